"""The server of the page: this machine, this user, nobody else.

It listens on the loopback interface. Every address begins with a word that nobody can guess and that is printed once, so another
user of the machine is refused. A page of another site cannot ask it either: a request must be addressed to this machine by its own
name (or a site could point a name of its own here), and what a script sent from elsewhere is refused. Nothing is written, and
nothing read but the config.json of models that are asked for. There is nothing but GET.

    /WORD/          the page            /WORD/plan    an answer at once
    /WORD/file      the page as a file  /WORD/more    what takes longer, a line of JSON for each piece as it comes
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from ...base.processes.signals import StoppedEarly
from .answers import answer
from .asking import Asked, Wrong, read
from .page import Kept, file_page, live_page
from .slow import Slow

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")
SECOND = "b."  # what names of the second set-up begin with
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, first: Mapping[str, str], port: int = 0) -> None:
        super().__init__((LOOPBACK, port), _Handler)
        self.word = secrets.token_urlsafe(18)
        self.page = live_page(first)
        self.slow = Slow()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/{self.word}/"

    def __enter__(self) -> Server:
        """The thread that enters must live as long as the server: processes end with the thread that started them."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        self.slow.prepare()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()
        self.slow.close()


def serve(first: Mapping[str, str], *, port: int = 0, show: bool = True) -> int:
    """Until Ctrl-C. port: 0 = any that is free. show: open the browser, where there is one. -> exit code"""
    try:
        server = Server(first, port)
    except OSError as error:
        raise ValueError(f"port {port} cannot be used ({error.strerror}); name another with --port, or none") from None
    shown = None
    try:
        with server:
            port = server.server_address[1]
            print(
                f"ithaca plan: {server.url}\nCtrl-C ends it. To see it elsewhere: ssh -L {port}:{LOOPBACK}:{port} HOST",
                flush=True,
            )
            shown = (
                _open(server.url) if show and (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) else None
            )
            threading.Event().wait()
    except (KeyboardInterrupt, StoppedEarly) as stopped:
        if getattr(stopped, "name", "SIGINT") != "SIGINT":
            raise  # Ctrl-C is how it is meant to end
    finally:
        if shown is not None:
            os.unlink(shown)
    return 0


def _open(url: str) -> str:
    """In the browser, by way of a file that only this user can read: others see the words of a command. -> the file"""
    import webbrowser

    with tempfile.NamedTemporaryFile("w", prefix="ithaca-plan-", suffix=".html", delete=False) as file:
        file.write(
            f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(url)}"><a href="{escape(url)}">the plan</a>'
        )
    webbrowser.open(f"file://{file.name}")
    return file.name


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # seconds for somebody who connects and says nothing

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        _, word, *rest = parts.path.split("/", 2)
        refused = self._refused(word, rest)
        if refused is not None:
            self._send(403, "text/plain; charset=utf-8", f"{refused}\n".encode())
            return
        do: dict[str, Callable[[dict[str, str]], None]] = {
            "": self._page, "plan": self._plan, "more": self._more, "file": self._file
        }  # fmt: skip
        if rest[0] not in do:
            self._send(404, "text/plain; charset=utf-8", b"there is nothing here\n")
            return
        with suppress(ConnectionError):  # whoever asked has gone
            do[rest[0]](dict(parse_qsl(parts.query, max_num_fields=100)))

    def _refused(self, word: str, rest: list[str]) -> str | None:
        """Why this is not answered."""
        host = self.headers.get("Host", "")
        if host.rpartition(":")[0] not in NAMES and host not in NAMES:
            return "this is not addressed to this machine by its own name"
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        asks = rest not in ([], [""])  # the page itself may be opened from anywhere: a mail, a note
        if (origin is not None and origin != f"http://{host}") or (asks and site not in ("same-origin", "none")):
            return "another page has asked"
        if not rest or not hmac.compare_digest(word.encode(), self.server.word.encode()):
            return "the address is not the one that was printed"
        return None

    def _page(self, query: dict[str, str]) -> None:
        self._send(200, "text/html; charset=utf-8", self.server.page.encode())

    def _plan(self, query: dict[str, str]) -> None:
        self._json(self._answered(query))

    def _answered(self, query: dict[str, str]) -> dict[str, Any]:
        try:
            found = answer(read(query))
        except Wrong as error:
            return {"problems": error.problems}
        except (ValueError, OSError) as error:
            return {"problems": {"": str(error)}}
        return {"answer": found} if found is not None else {"counting": True}

    def _more(self, query: dict[str, str]) -> None:
        place, longest = query.pop("place", ""), query.pop("longest", "") == "yes"
        try:
            asked = read(query)
        except Wrong as error:
            self._json({"part": "trouble", "value": str(error)})
            return
        self._begin(200, "application/x-ndjson; charset=utf-8")
        answers = self.server.slow.ask(place, asked, longest=longest)
        try:
            for piece in answers:
                self.wfile.write(b"\n" if piece is None else json.dumps(piece, allow_nan=False).encode() + b"\n")
                self.wfile.flush()
        finally:
            answers.close()  # pyright: ignore

    def _file(self, query: dict[str, str]) -> None:
        second = {name.removeprefix(SECOND): word for name, word in query.items() if name.startswith(SECOND)}
        first = {name: word for name, word in query.items() if not name.startswith(SECOND)}
        setups = []
        for words in (first, second) if second else (first,):
            try:
                setups.append(self._kept(read(words)))
            except (ValueError, OSError) as error:
                self._send(422, "text/plain; charset=utf-8", f"{error}\n".encode())
                return
        page = file_page(setups).encode()
        self._send(200, "text/html; charset=utf-8", page, {"Content-Disposition": 'attachment; filename="plan.html"'})

    def _kept(self, asked: Asked) -> Kept:
        pieces = self.server.slow.known(asked)
        counted = next((piece["value"] for piece in pieces if piece["part"] == "answer"), None)
        setup = answer(asked) or counted
        if setup is None:
            raise ValueError("the dry run is not over yet")
        return setup, [piece for piece in pieces if piece["part"] != "answer"]

    def _json(self, value: Any) -> None:
        self._send(200, "application/json; charset=utf-8", json.dumps(value, allow_nan=False).encode())

    def _send(self, status: int, kind: str, body: bytes, more: Mapping[str, str] | None = None) -> None:
        self._begin(status, kind, {"Content-Length": str(len(body)), **(more or {})})
        self.wfile.write(body)

    def _begin(self, status: int, kind: str, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def version_string(self) -> str:
        return "ithaca"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line for every key that is pressed is no use."""
