"""Records as people have them, read into one of a few things: a text, a prompt with its completion, a chat, or several of these.

ShareGPT, Alpaca and lists of messages all say the same, who said what, in other words. Here they become messages of `role` and
`content`, which a chat template renders (chat.py). Preferences are two of them, rollouts as many as there are completions.

What is wrong with a record is said with its column, the place in it, and what was expected; work.py adds file and line.
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any, NamedTuple

from .source import VALUES, Source, did_you_mean

Messages = list[dict[str, Any]]

_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "function_call": "assistant",
}
"""Who speaks in ShareGPT, and the role it is."""

# Where there is no chat template: the words of Stanford's Alpaca.
_TASK = "Below is an instruction that describes a task"
_ALPACA = _TASK + (
    ". Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
_ALPACA_INPUT = _TASK + (
    ", paired with an input that provides further context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


class Pair(NamedTuple):
    """Only the completion is learned."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    messages: Messages
    tools: Any
    learned: list[bool]  # of each message; it counts for those of the assistant

    @property
    def all_learned(self) -> bool:
        return all(
            learned
            for learned, message in zip(self.learned, self.messages, strict=True)
            if message["role"] == "assistant"
        )


class Ids(NamedTuple):
    """A prompt and its completion as token ids."""

    prompt: list[int]
    completion: list[int]


class Rollouts(NamedTuple):
    """Completions of one prompt, each with how it was judged."""

    examples: list[Pair | Chat | Ids]
    what: str  # of VALUES
    values: list[float]
    logprobs: list[list[float]] | None  # of the tokens of each completion, by whoever sampled it


Answered = Pair | Chat | Ids
Example = str | Answered


def read_example(record: dict[str, Any], kind: str, source: Source, *, template: bool) -> Example:
    """What a record says. template: whether there is a chat template. An empty text or chat is an empty document."""
    if kind == "text":
        return _text(record, source, "text", required=True)
    if kind == "alpaca":
        return _alpaca(record, source, template)
    if kind == "completion":
        return _answered(record, source, "completion", get(record, source, "completion"), get(record, source, "prompt"))
    if kind == "preference":
        return read_preference(record, source)[0]
    assert kind in ("chat", "sharegpt")
    column = "messages" if kind == "chat" else "conversations"
    said = get(record, source, column)
    if not said:
        return Chat([], None, [])
    messages = said if kind == "chat" else _turns(said, source.column(column))
    if kind == "sharegpt" and (system := _text(record, source, "system")):
        messages = [{"role": "system", "content": system}, *messages]
    return _chat(messages, source.column(column), record, source)


def read_preference(record: dict[str, Any], source: Source) -> tuple[Answered, Answered]:
    """The chosen and the rejected answer, each with what it answers."""
    names = [source.column(name) for name in ("prompt", "chosen", "rejected")]
    prompt, chosen, rejected = record.get(names[0]), *(get(record, source, name) for name in ("chosen", "rejected"))
    if type(chosen) is not type(rejected):
        raise ValueError(
            f"the column {names[1]!r} is {type_of(chosen)} and {names[2]!r} is {type_of(rejected)}; expected two texts or "
            "two lists of messages"
        )
    if not isinstance(chosen, list) or isinstance(prompt, list) or is_ids(chosen):
        if prompt is None:
            raise ValueError(
                f"there is no {names[0]!r}, so where the answers begin is not known; expected that column, or lists of messages in "
                f"{names[1]!r} and {names[2]!r}. To learn the chosen texts as a whole: kind: text, columns: {{text: {names[1]}}}"
            )
        return _answered(record, source, "chosen", chosen, prompt), _answered(
            record, source, "rejected", rejected, prompt
        )
    for name, answer in zip(names[1:], (chosen, rejected), strict=True):
        check_messages(answer, name)
    most = min(len(chosen), len(rejected)) - 1
    shared = next((at for at in range(most) if chosen[at] != rejected[at]), most)
    if shared == 0:
        raise ValueError(
            f"the columns {names[1]!r} and {names[2]!r} have no first message in common, so what they answer is not known; give it "
            f"in {names[0]!r}, as a list of messages"
        )
    if prompt is not None and prompt != chosen[shared - 1].get("content"):
        raise ValueError(
            f"the column {names[0]!r} is not the message before the answers in {names[1]!r}; expected the same text, or a list "
            "of messages"
        )
    first, second = (
        _chat(answer, name, record, source, shared) for name, answer in zip(names[1:], (chosen, rejected), strict=True)
    )
    return first, second


def read_rollouts(record: dict[str, Any], source: Source) -> Rollouts:
    """Completions of one prompt, with rewards or advantages, and log-probabilities where there are any."""
    column = source.column("completions")
    prompt, answers = get(record, source, "prompt"), get(record, source, "completions")
    if not isinstance(answers, list) or not answers:
        what = "empty" if answers == [] else type_of(answers)
        raise ValueError(f"the column {column!r} is {what}; expected a list of completions of the prompt")
    given = [name for name in VALUES if record.get(source.column(name)) is not None]
    if len(given) != 1:
        one, other = (repr(source.column(name)) for name in VALUES)
        said = f"both {one} and {other} are given" if given else f"neither {one} nor {other} is given"
        raise ValueError(f"{said}; expected one of them: a number for each completion")
    values = record[source.column(given[0])]
    _check_numbers(values, source.column(given[0]), len(answers), f"the {len(answers)} completions")
    examples = [_answered(record, source, "completions", answer, prompt, at) for at, answer in enumerate(answers)]
    where, logprobs = source.column("logprobs"), record.get(source.column("logprobs"))
    if logprobs is not None:
        if not isinstance(logprobs, list) or len(logprobs) != len(answers):
            found = f"{len(logprobs)} lists" if isinstance(logprobs, list) else type_of(logprobs)
            raise ValueError(
                f"the column {where!r} is {found}; expected a list for each of the {len(answers)} completions"
            )
        for at, numbers in enumerate(logprobs):
            _check_numbers(numbers, f"{where}[{at}]", None, "the tokens of a completion")
            wrong = next((number for number in numbers if number > 0), None)
            if wrong is not None:
                raise ValueError(f"{where}[{at}] has {wrong}; a log-probability is at most 0")
    return Rollouts(examples, given[0], [float(value) for value in values], logprobs)


def _check_numbers(values: Any, column: str, count: int | None, of: str) -> None:
    if not isinstance(values, list) or (count is not None and len(values) != count):
        found = f"{len(values)} numbers" if isinstance(values, list) else type_of(values)
        raise ValueError(f"{column} is {found}; expected a list of numbers, one for each of {of}")
    for at, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise ValueError(f"{column}[{at}] is {short(value)}; expected a finite number")


def is_empty(example: Answered) -> bool:
    """Whether nothing was answered."""
    if isinstance(example, Chat):
        said = [
            m
            for m, learned in zip(example.messages, example.learned, strict=True)
            if learned and m["role"] == "assistant"
        ]
        return not any(message.get("content") or message.get("tool_calls") for message in said)
    return len(example.completion) == 0


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _answered(
    record: dict[str, Any], source: Source, name: str, answer: Any, prompt: Any, at: int | None = None
) -> Answered:
    """A prompt and what follows: two texts, two lists of messages, or token ids. at: of which completion."""
    column, asked = source.column(name) + ("" if at is None else f"[{at}]"), source.column("prompt")
    if isinstance(prompt, str) and isinstance(answer, str):
        return Pair(prompt, answer)
    if name != "completion" and isinstance(prompt, list) and is_ids(prompt) and (answer == [] or is_ids(answer)):
        return Ids(prompt, answer)
    if not (isinstance(prompt, list) and isinstance(answer, list)):
        raise ValueError(
            f"the column {asked!r} is {type_of(prompt)} and {column!r} is {type_of(answer)}; expected two texts, or two lists of "
            "messages"
        )
    if at is not None and answer == []:
        return Chat(prompt, tools_of(record, source), [False] * len(prompt))  # which is_empty
    for each, messages in ((asked, prompt), (column, answer)):
        check_messages(messages, each)
    if answer[: len(prompt)] == prompt:  # the whole conversation, as some write it
        answer = answer[len(prompt) :]
    return _chat([*prompt, *answer], column, record, source, len(prompt))


def _alpaca(record: dict[str, Any], source: Source, template: bool) -> Pair | Chat:
    instruction = _text(record, source, "instruction", required=True)
    output = _text(record, source, "output", required=True)
    given, system = _text(record, source, "input"), _text(record, source, "system")
    history = _history(record.get(source.column("history")), source.column("history"))
    if not template:
        extra = "history" if history else "system" if system else None
        if extra is not None:
            raise ValueError(
                f"the column {source.column(extra)!r} needs a chat template, and the tokenizer has none; give one (--chat-template)"
            )
        words = _ALPACA_INPUT if given else _ALPACA
        return Pair(words.format(instruction=instruction, input=given), output)
    messages: Messages = [{"role": "system", "content": system}] if system else []
    for asked, answer in [*history, (f"{instruction}\n{given}" if given else instruction, output)]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    if not (instruction or given or output):
        messages = []
    return Chat(messages, None, [True] * len(messages))


def _history(value: Any, column: str) -> list[tuple[str, str]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"the column {column!r} is {type_of(value)}; expected a list of [instruction, output]")
    for at, turn in enumerate(value):
        if not (isinstance(turn, list) and len(turn) == 2 and all(isinstance(text, str) for text in turn)):
            raise ValueError(f"{column}[{at}] is {short(turn)}; expected [instruction, output], two texts")
    return [(asked, answer) for asked, answer in value]


def _turns(turns: Any, column: str) -> Messages:
    """Turns of ShareGPT as messages. Some data has messages in this column; they stay what they are."""
    if not isinstance(turns, list):
        raise ValueError(
            f"the column {column!r} is {type_of(turns)}; expected a list of turns, each with 'from' and 'value'"
        )
    messages = []
    for at, turn in enumerate(turns):
        where = f"{column}[{at}]"
        if not isinstance(turn, dict):
            raise ValueError(f"{where} is {type_of(turn)}; expected an object with 'from' and 'value'")
        if turn.get("from") is None and turn.get("role") is not None:
            messages.append(turn)
            continue
        speaker, said = turn.get("from"), turn.get("value")
        if speaker not in _SPEAKERS:
            hint = did_you_mean(speaker, _SPEAKERS) if isinstance(speaker, str) else ""
            raise ValueError(f"{where}.from is {short(speaker)}; expected one of {', '.join(_SPEAKERS)}{hint}")
        if not isinstance(said, str):
            missing = "" if "value" in turn else f" (there is {', '.join(map(repr, turn))})"
            raise ValueError(f"{where}.value is {type_of(said)}{missing}; expected a text")
        message = {"role": _SPEAKERS[speaker], "content": said, "weight": turn.get("weight")}
        if speaker == "function_call":
            message |= {"content": "", "tool_calls": _calls(said, f"{where}.value")}
        messages.append(message)
    return messages


def _calls(text: str, where: str) -> list[dict[str, Any]]:
    """A call of a tool, or several, written as JSON."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    calls: list[dict[str, Any]] = []
    for call in found if isinstance(found, list) else [found]:
        if isinstance(call, dict) and isinstance(call.get("name"), str) and "arguments" in call:
            calls.append({"type": "function", "function": {name: call[name] for name in ("name", "arguments")}})
        else:
            raise ValueError(
                f'{where} is {short(text)}; expected a call as JSON: {{"name": "...", "arguments": {{...}}}}'
            )
    return calls


def _chat(messages: Any, column: str, record: dict[str, Any], source: Source, first: int = 0) -> Chat:
    """A chat that is learned from message `first` on; a message of the assistant with weight 0 is not."""
    check_messages(messages, column)
    learned = [at >= first and message.get("weight") != 0 for at, message in enumerate(messages)]
    messages = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    return Chat(messages, tools_of(record, source), learned)


def tools_of(record: dict[str, Any], source: Source) -> Any:
    column = source.column("tools")
    tools = record.get(column)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise ValueError(f"the column {column!r} is a text but no JSON; expected a list of tools") from None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"the column {column!r} is {type_of(tools)}; expected a list of tools, or its JSON")
    return tools


def check_messages(messages: Any, column: str) -> None:
    """ValueError unless this is a list of messages."""
    if not isinstance(messages, list) or not messages:
        what = "empty" if messages == [] else type_of(messages)
        raise ValueError(
            f"the column {column!r} is {what}; expected a list of messages, each with 'role' and 'content'"
        )
    for at, message in enumerate(messages):
        where = f"{column}[{at}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} is {type_of(message)}; expected an object with 'role' and 'content'")
        present = ", ".join(map(repr, message)) or "nothing"
        if not isinstance(message.get("role"), str):
            hint = " (ShareGPT: kind: sharegpt, columns: {conversations: " + column + "})" if "from" in message else ""
            raise ValueError(f"{where} has no 'role'; it has {present}; expected 'role' and 'content'{hint}")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(f"{where} ({message['role']}) has no 'content'; it has {present}")
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise ValueError(f"{where}.content ({message['role']}) is {type_of(content)}; expected a text")
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(
                f"{where}.weight is {short(message['weight'])}; expected 1, or 0 for a turn that is not learned"
            )


def get(record: dict[str, Any], source: Source, name: str) -> Any:
    column = source.column(name)
    if column not in record:
        raise ValueError(
            f"the column {column!r} is missing{did_you_mean(column, record)}; present are "
            f"{', '.join(map(repr, record)) or 'none'}. Map it, as in columns: {{{name}: NAME}}"
        )
    return record[column]


def _text(record: dict[str, Any], source: Source, name: str, *, required: bool = False) -> str:
    value = get(record, source, name) if required else record.get(source.column(name))
    if value is not None and not isinstance(value, str):
        raise ValueError(f"the column {source.column(name)!r} is {type_of(value)}, not a text: {short(value)}")
    return value or ""


def type_of(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
