"""A headless Chromium, driven by its DevTools protocol over a pipe: no driver, no port, no further package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
LIMIT_S = 30.0
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--force-device-scale-factor=1", "--remote-debugging-pipe",
)  # fmt: skip


def find_chromium() -> str | None:
    """Return the path of a browser on this machine, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """A page in the browser.

    Attributes:
        requests: addresses that it requested, without data in the page itself.
        errors: errors on the console, exceptions, and violations of its policy.
    """

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser, self._target, self._session = browser, target, session
        self._loaded: set[str] = set()
        self.requests: list[str] = []
        self.errors: list[str] = []

    def watch(self) -> None:
        """Receive the events of the page."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")
        self.ask("Page.setLifecycleEventsEnabled", enabled=True)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def open(self, file: Path) -> None:
        """Open a file, and wait until all charts are drawn."""
        self.go_to(file)
        self.wait_for("document.documentElement.dataset.ready === 'true'")

    def go_to(self, file: Path) -> None:
        """Open a file, and wait until it is loaded."""
        loader = self.ask("Page.navigate", url=file.as_uri())["loaderId"]
        while loader not in self._loaded:
            self._browser.hear_next("Page.navigate")

    def show_as(self, scheme: str, width: int = 1200, height: int = 900) -> None:
        """Emulate a "light" or "dark" system, and a window of this size."""
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )  # fmt: skip

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        done = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a condition holds."""
        until = (
            f"new Promise(done => {{ const look = () => ({condition}) ? done(true) : setTimeout(look, 10); look(); }})"
        )
        assert self.value(until) is True

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the first element."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{place}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        x, y = self.value(f"(box => [box.x + box.width / 2, box.y + box.height / 2])({place}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, text: str = "") -> None:
        """Press a key where the focus is."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """Put text where the focus is, as typing does."""
        self.ask("Input.insertText", text=text)

    def screenshot(self, *, whole: bool = False) -> bytes:
        """Return the visible part as a PNG, or the `whole` page."""
        return base64.b64decode(self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def close(self) -> None:
        """Close it."""
        self._browser.close_tab(self._target)

    def hear(self, event: dict[str, Any]) -> None:
        params = event["params"]
        match event["method"]:
            case "Page.lifecycleEvent" if params["name"] == "load":
                self._loaded.add(params["loaderId"])
            case "Network.requestWillBeSent" if not params["request"]["url"].startswith(("data:", "blob:")):
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(params["entry"]))


class Browser:
    """The process and its pipe; messages are JSON, each ended by a zero."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._number, self._left = 0, b""
        self._tabs: dict[str, Tab] = {}

    def open_tab(self) -> Tab:
        context = self.ask("Target.createBrowserContext")["browserContextId"]  # an isolated context
        target = self.ask("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._tabs[session] = tab = Tab(self, target, session)
        tab.watch()
        return tab

    def close_tab(self, target: str) -> None:
        self.ask("Target.closeTarget", targetId=target)

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self.hear_next(method)).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    def hear_next(self, method: str) -> dict[str, Any]:
        """Wait for the next message during a call of `method`, and pass events to their tab."""
        answer = self._next(method)
        tab = self._tabs.get(answer.get("sessionId", ""))
        if tab is not None and "method" in answer:
            tab.hear(answer)
        return answer

    def _next(self, method: str) -> dict[str, Any]:
        end = time.monotonic() + LIMIT_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._back], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium has not answered {method} in {LIMIT_S:g} seconds"
            data = os.read(self._back, 1 << 20)
            assert data, f"Chromium has ended with {self._process.wait(LIMIT_S)}"
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(message))


@contextlib.contextmanager
def chromium(program: str, profile: Path) -> Iterator[Browser]:
    """Run a browser. It reads descriptor 3 and writes 4."""
    theirs_in, to = os.pipe()
    back, theirs_out = os.pipe()
    command = ["bash", "-c", 'exec "$@" 3<&"$0" 4>&"$FD_OUT"', str(theirs_in), program, *FLAGS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={profile}"],
        pass_fds=(theirs_in, theirs_out),
        env={**os.environ, "FD_OUT": str(theirs_out)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Browser(process, to, back)
    finally:
        with contextlib.suppress(OSError):
            os.close(to)  # the browser exits at the end of its input
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(back)
