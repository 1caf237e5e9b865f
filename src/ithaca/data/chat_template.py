"""Chat templates, rendered in a process of their own that can be stopped.

A chat template is a program that comes with a tokenizer. jinja's sandbox keeps it away from Python's insides, not from the machine:
two nested loops, or a text that is doubled forty times, go on for ever or take all memory, and nothing inside a process can end
that. So templates run in a child that has limits of its own: of memory, of time spent computing (waiting for a busy machine does
not count), and of the text that comes out. All of them grow with the chat. A child serves many chats; one that was stopped is
replaced.

Messages go in and text comes out as JSON, with its length before it.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

SECONDS, MEMORY, OUTPUT = 10, 512 << 20, 16 << 20  # of a small chat
_LENGTH = 8  # bytes of the length before a message


def render(
    template: str, messages: Any, tools: Any, tokens: dict[str, Any], *, prompt: bool, mark: bool
) -> tuple[str, Any]:
    """The text of a chat, and the ranges that the template marks as the assistant's. ValueError if it does not come to an end."""
    wanted = {"messages": messages, "tools": tools, "tokens": tokens, "prompt": prompt, "mark": mark}
    # what JSON has not (a date, a decimal number of parquet) is written as a template would print it
    message = json.dumps({"template": template, "seconds": SECONDS, **wanted}, default=str).encode()
    answer = _child().ask(message)
    if "refused" in answer:
        raise ValueError(f"the chat template refuses this chat: {answer['refused']}")
    return answer["text"], [(int(begin), int(end)) for begin, end in answer["marks"]]


class _Child:
    def __init__(self) -> None:
        self.owner, self.lock = os.getpid(), threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ithaca.data.chat_template"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONSAFEPATH": "1"},  # nothing of the current folder is imported
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.into: IO[bytes] = self.process.stdin
        self.out: IO[bytes] = self.process.stdout
        atexit.register(self.stop)

    @property
    def usable(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, wanted: bytes) -> dict[str, Any]:
        with self.lock:
            try:
                _send(self.into, wanted)
                answer = _receive(self.out)
            except OSError:
                answer = None
            if answer is not None:
                return json.loads(answer)
            self.stop()
        if self.process.returncode == -signal.SIGPROF:
            why = f"it was still computing after {_seconds(SECONDS, len(wanted)):.1f} s"
        else:
            why = f"it broke the process that it ran in (exit code {self.process.returncode})"
        return {"refused": f"{why}; give another template (--chat-template)"}

    def stop(self) -> None:
        if self.owner != os.getpid():  # a fork has inherited it
            return
        atexit.unregister(self.stop)
        for pipe in (self.into, self.out):
            with suppress(OSError):  # what it did not read any more
                pipe.close()
        self.process.wait()


_current: _Child | None = None


def _child() -> _Child:
    global _current
    if _current is None or not _current.usable:
        _current = _Child()
    return _current


def _seconds(least: float, size: int) -> float:
    return least + size / 1e6


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(_LENGTH, "big") + message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    head = pipe.read(_LENGTH)
    if len(head) < _LENGTH:
        return None
    message = pipe.read(size := int.from_bytes(head, "big"))
    return message if len(message) == size else None


# -- the child --------------------------------------------------------------------------------------------------------


def _serve() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; without it this ends
    while (message := _receive(sys.stdin.buffer)) is not None:
        wanted, size = json.loads(message), len(message)
        _limit(_memory() + MEMORY + 64 * size, _seconds(wanted["seconds"], size))
        try:
            answer = json.dumps(_rendered(wanted, render_jinja_template, OUTPUT + 16 * size)).encode()
        except MemoryError:
            answer = b'{"refused": "it takes too much memory; give another template (--chat-template)"}'
        except Exception as error:  # a template raises whatever it likes
            text = str(getattr(error, "message", None) or error)[:500]
            answer = json.dumps({"refused": text or type(error).__name__}).encode()
        _limit(resource.RLIM_INFINITY, 0)
        _send(sys.stdout.buffer, answer)


def _rendered(wanted: dict[str, Any], render_jinja_template: Any, limit: int) -> dict[str, Any]:
    # the function behind tokenizer.apply_chat_template, which would bring torch and loses marked turns that begin or end with
    # a space
    texts, marks = render_jinja_template(
        conversations=[wanted["messages"]], chat_template=wanted["template"], tools=wanted["tools"] or None,
        add_generation_prompt=wanted["prompt"], return_assistant_tokens_mask=wanted["mark"], **wanted["tokens"],
    )  # fmt: skip
    if len(texts[0]) > limit:
        return {"refused": f"it writes {len(texts[0]):,} characters; give another template (--chat-template)"}
    return {"text": texts[0], "marks": marks[0] if wanted["mark"] else []}


def _limit(memory: int, seconds: float) -> None:
    """SIGPROF ends the process, in the middle of whatever it computes. 0 s: no limit."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _memory() -> int:
    """Bytes of address space that this process has now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    _serve()
