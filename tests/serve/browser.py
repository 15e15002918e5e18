"""A headless Chromium, controlled through the DevTools protocol on two pipes, without driver or library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

CANDIDATES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")
KEYS = {"Enter": ("\r", 13), "Escape": ("", 27), "ArrowUp": ("", 38), "ArrowDown": ("", 40), "Comma": ("", 188)}
MODIFIERS = {"Alt": 1, "Control": 2, "Shift": 8}


def find_browser() -> str | None:
    """Return the path of an installed Chromium."""
    return next((result for name in CANDIDATES if (result := shutil.which(name))), None)


class Browser:
    """One browser with one tab."""

    def __init__(self, program: str, profile: Path, *, language: str = "en-GB") -> None:
        into, self._write = os.pipe()
        self._read, out = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run"]
        options += ["--disable-dev-shm-usage", "--disable-background-networking", "--force-device-scale-factor=1"]
        options += [f"--user-data-dir={profile}", f"--lang={language}", f"--accept-lang={language}", "about:blank"]
        # The browser reads commands from descriptor 3 and writes to 4.
        shell = f'exec "$0" "$@" 3<&{into} 4>&{out} 2>/dev/null'
        environment = {**os.environ, "LANGUAGE": language.replace("-", "_")}
        self._process = subprocess.Popen(
            ["bash", "-c", shell, program, *options], pass_fds=(into, out), stdout=subprocess.DEVNULL, env=environment
        )
        os.close(into)
        os.close(out)
        self._rest = b""
        self._count = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        self.dialogs: list[str | None] = []
        """Answers to the next questions of the page (`confirm`, `prompt`); None cancels."""
        (page,) = [item for item in self.send("Target.getTargets")["targetInfos"] if item["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        os.close(self._write)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        number = self._post(method, parameters)
        while True:
            message = self._next()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result

    def _post(self, method: str, parameters: dict[str, Any]) -> int:
        self._count += 1
        session = {"sessionId": self._session} if self._session else {}
        text = json.dumps({"id": self._count, "method": method, "params": parameters, **session})
        os.write(self._write, text.encode() + b"\0")
        return self._count

    def _next(self, seconds: float = 120) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], seconds)[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self.events.append(message)
        if message.get("method") == "Page.javascriptDialogOpening":
            answer = self.dialogs.pop(0)
            text = {} if answer is None else {"promptText": answer}
            self._post("Page.handleJavaScriptDialog", {"accept": answer is not None, **text})
        return message

    def open(self, url: str) -> None:
        """Open a URL, and wait until it is loaded."""
        self.events.clear()
        self.send("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, awaiting promises."""
        output = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in output:
            raise RuntimeError(output["exceptionDetails"].get("exception", {}).get("description", str(output)))
        return output["result"].get("value")

    def until(self, script: str, seconds: float = 60) -> None:
        """Wait until an expression in the page is true."""
        result = self.run(
            f"""new Promise((done) => {{
              const end = performance.now() + {seconds * 1000};
              const look = () => {{
                let value = null;
                try {{ value = ({script}); }} catch (error) {{ value = null; }}
                if (value || performance.now() > end) done(!!value);
                else setTimeout(look, 20);
              }};
              look();
            }})"""
        )
        assert result, f"never true: {script}\n{self.run('document.body.innerText')}"

    def wait(self, event: str, which: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for an event with matching parameters, and consume it."""
        while not (result := [item for item in self.events if item["method"] == event and which(item["params"])]):
            self._next()
        self.events.remove(result[0])

    def type(self, text: str) -> None:
        """Type text into the focused element."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *servers: str) -> None:
        """Press a key, by name or code (KeyN), with modifiers."""
        text, number = KEYS.get(key, ("", ord(key[-1])))
        name = key if key in KEYS else key[-1].lower()
        modifiers = sum(MODIFIERS[item] for item in servers)
        output = {"key": name, "code": key, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **output)
        self.send("Input.dispatchKeyEvent", type="keyUp", **output)

    def look(self, place: Path, *, width: int = 1100, height: int = 760, dark: bool = False) -> None:
        """Write a picture of the page as PNG."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        place.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def asked(self) -> list[str]:
        """Return the URLs requested since the page was opened."""
        return [
            item["params"]["request"]["url"] for item in self.events if item["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Return the errors in the page's console."""
        result = [
            item["params"]["exceptionDetails"]["text"]
            for item in self.events
            if item["method"] == "Runtime.exceptionThrown"
        ]
        logged = [item["params"]["entry"] for item in self.events if item["method"] == "Log.entryAdded"]
        return result + [item["text"] for item in logged if item["level"] == "error"]
