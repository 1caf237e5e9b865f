"""A headless Chromium, driven over the pipe it offers for that (DevTools protocol): open a page, ask it, touch it, look at it.

Only the standard library. One browser serves all tests; each gets a tab of its own with a size and a theme.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...waiting import wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome")

# The browser reads from file 3 and writes to file 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, profile: Path) -> None:
        program = find()
        assert program, "needs chromium"
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Every name but this machine's resolves to nothing: the page has to do without a network.
        self._process = subprocess.Popen(
            [
                sys.executable, "-c", LAUNCH, str(to_browser), str(from_browser), program,
                "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run", "--disable-sync",
                "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--user-data-dir={profile}", "about:blank",
            ],
            pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._next = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._next += 1
        message: dict[str, Any] = {"id": self._next, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._next:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            found = os.read(self._in, 1 << 20)
            assert found, "the browser has ended"
            self._rest += found
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def close(self) -> None:
        os.close(self._out)  # the browser ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    @contextmanager
    def open(self, page: Path | str, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Tab]:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events.clear()
        try:
            tab = Tab(self, session)
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.call(f"{domain}.enable")
            phone = width < 600
            tab.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=2 if phone else 1,
                mobile=phone,
            )
            tab.call("Emulation.setTouchEmulationEnabled", enabled=phone)
            theme = "dark" if dark else "light"
            tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            tab.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
            tab.wait("document.body && document.body.dataset.ready === 'yes'")
            tab.settle()
            yield tab
        finally:
            self.call("Target.closeTarget", targetId=target)


class Tab:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        wait_until(lambda: self.ask(expression), lambda: f"({expression}); {self.troubles()}")

    def settle(self) -> None:
        """Two frames: sizes are observed and charts drawn."""
        self.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def text(self, selector: str) -> str:
        """Text as a person reads it, with plain spaces."""
        found = self.ask(f"document.querySelector({json.dumps(selector)})?.textContent")
        assert found is not None, f"nothing matches {selector}"
        return found.replace("\u00a0", " ")

    def count(self, selector: str) -> int:
        return self.ask(f"document.querySelectorAll({json.dumps(selector)}).length")

    def box(self, selector: str) -> dict[str, float]:
        """Where it is, after bringing it into view."""
        self.ask(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        return self.ask(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def drag(self, x: float, y: float, to_x: float) -> None:
        self.mouse("Moved", x, y)
        self.mouse("Pressed", x, y, button="left", clickCount=1)
        for share in (0.5, 1):
            self.mouse("Moved", x + share * (to_x - x), y, button="left", buttons=1)
        self.mouse("Released", to_x, y, button="left", clickCount=1)
        self.settle()

    def swipe(self, x: float, y: float, to_x: float) -> None:
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        for share in (0.3, 0.6, 1) if to_x != x else ():
            self.call("Input.dispatchTouchEvent", type="touchMove", touchPoints=[{"x": x + share * (to_x - x), "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def double_click(self, x: float, y: float) -> None:
        for count in (1, 2):
            self.mouse("Pressed", x, y, button="left", clickCount=count)
            self.mouse("Released", x, y, button="left", clickCount=count)
        self.settle()

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                **({"text": key} if len(key) == 1 and kind == "keyDown" else {}),
            )

    def troubles(self) -> list[str]:
        """What the console complained about, errors nobody caught, and requests that left the page."""
        self.ask("1")  # collects what has come
        found = []
        for event in self._browser.events:
            about = event.get("params", {})
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.consoleAPICalled":
                found.append(f"console.{about['type']}: {about['args']}")
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(f"exception: {about['exceptionDetails']}")
            elif event["method"] == "Log.entryAdded":
                found.append(f"log: {about['entry']['level']} {about['entry']['text']}")
        return found

    def requests(self) -> list[str]:
        self.ask("1")
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"]["request"]["url"] for event in mine if event["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path, whole: bool = True) -> None:
        if whole:
            # A sticky element would repeat; a viewport as tall as the page shows it once.
            size = self.ask("[innerWidth, document.documentElement.scrollHeight]")
            scale = 2 if size[0] < 600 else 1
            self.call(
                "Emulation.setDeviceMetricsOverride",
                width=size[0],
                height=size[1],
                deviceScaleFactor=scale,
                mobile=size[0] < 600,
            )
            self.settle()
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
