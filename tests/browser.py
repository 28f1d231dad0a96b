"""A headless Chromium that a test drives as a user would: by mouse, reading what the page shows.

Speaks Chromium's DevTools protocol over one WebSocket, so that no driver has to match the browser's version.

It does not: install a browser. `find()` is None where there is none, and tests skip.
"""

import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import websocket

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SIZE = (1400, 1000)
SETTLE_S = 0.5  # a menu that has just opened does not take a click yet


def find() -> str | None:
    """The first browser of `NAMES` on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a fresh browser profile under `folder`. Use as a context manager."""

    def __init__(self, program: str, folder: Path) -> None:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={folder}", f"--window-size={SIZE[0]},{SIZE[1]}"]
        self.log = open(folder.with_suffix(".log"), "w+")
        self.process = subprocess.Popen([program, *flags, "about:blank"], stdout=self.log, stderr=self.log)
        self.socket, self.number, self.failed = None, 0, []

    def __enter__(self) -> "Browser":
        port = wait_for(self.port, 30, "the browser's port")
        pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list"))
        address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
        self.socket = websocket.create_connection(address, suppress_origin=True, timeout=60)
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(30)
        self.log.close()

    def port(self) -> str | None:
        """The debugging port that the browser chose, once it has said so."""
        found = re.search(r"DevTools listening on ws://[^:]+:(\d+)/", Path(self.log.name).read_text(errors="replace"))
        return found and found[1]

    def call(self, method: str, **params) -> dict:
        """One DevTools command and its result; failed requests of the page are kept in `failed`."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("method") == "Network.loadingFailed":
                self.failed.append(message["params"])
            if message.get("id") == self.number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def open(self, address: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=address)

    def js(self, expression: str):
        """The value of a JavaScript expression, None where it is undefined or throws."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str, seconds: float) -> object:
        """Wait for an expression to become true; its value."""
        return wait_for(lambda: self.js(expression), seconds, expression)

    def click(self, selector: str, text: str) -> None:
        """Click the middle of the visible element that matches `selector` and shows exactly `text`."""
        middle = f"""(() => {{
            for (const element of document.querySelectorAll({json.dumps(selector)})) {{
                const box = element.getBoundingClientRect();
                if (element.textContent.trim() === {json.dumps(text)} && box.width)
                    return [box.x + box.width / 2, box.y + box.height / 2];
            }}
        }})()"""
        self.until(middle, 30)
        time.sleep(SETTLE_S)
        x, y = self.until(middle, 30)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            buttons = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **buttons)


def wait_for(condition, seconds: float, what: str):
    """The first true value of `condition()`, asked five times a second. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.2)
    raise TimeoutError(f"waited {seconds} s for {what}")
