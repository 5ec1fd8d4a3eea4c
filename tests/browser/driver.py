"""A browser that tests drive: chromium, through chromedriver's HTTP interface (W3C WebDriver)."""

import base64
import contextlib
import http.client
import json
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
AXE = Path(__file__).parents[2] / ".browser" / "node_modules" / "axe-core" / "axe.min.js"
ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--hide-scrollbars"),
)


class DriverError(AssertionError):
    """The driver answered with an error, such as a script's own or a page that was left."""


@dataclass
class Browser:
    """One window; `call` speaks WebDriver, `devtools` Chromium's own protocol."""

    host: http.client.HTTPConnection
    session: str = ""

    def call(self, path, **said):
        self.host.request("POST", f"/session/{self.session}/{path}", json.dumps(said))
        found = json.loads(self.host.getresponse().read())["value"]
        if isinstance(found, dict) and "error" in found:
            raise DriverError(found)
        return found

    def devtools(self, command, **params):
        return self.call("goog/cdp/execute", cmd=command, params=params)

    def look(self, width=1100, height=1400, *, dark=False, media=""):
        """Be a window of that size, with these wishes."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def open(self, path):
        self.visit(Path(path).resolve().as_uri())

    def visit(self, url):
        self.log()
        self.call("url", url=url)

    def until(self, script, seconds=60):
        """Return a script's first true value.

        Every error means: not yet. While a page loads, elements may be missing; while another one
        takes its place, the driver has none to run the script in.
        """
        end, problem = time.monotonic() + seconds, None
        while time.monotonic() < end:
            try:
                if found := self.run(script):
                    return found
            except DriverError as error:
                problem = error
            time.sleep(0.05)
        raise AssertionError(f"not after {seconds} s: {script}") from problem

    def run(self, script, *arguments):
        return self.call("execute/sync", script=script, args=list(arguments))

    def follow(self, element):
        """Click an element, given as an expression, and wait until another page has loaded."""
        self.run(f"const found = {element}; window.left = true; setTimeout(() => found.click())")
        self.until("return !window.left && document.readyState === 'complete'")

    def wait(self, script):
        return self.call("execute/async", script=script, args=[])

    def press(self, *keys):
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                self.devtools("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def log(self):
        """What the console said since it was last asked."""
        return [entry["message"] for entry in self.call("se/log", type="browser")]

    def axe(self):
        """What axe-core finds that is serious or worse."""
        self.run(AXE.read_text())
        found = self.wait("const done = arguments[0]; axe.run().then(r => done(r.violations))")
        return [
            (one["id"], [node["html"][:200] for node in one["nodes"]][:3])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]

    def picture(self, path, height=None):
        """A screenshot, of the whole page unless a height is given."""
        width = self.run("return document.documentElement.clientWidth")
        height = height or self.run("return document.documentElement.scrollHeight")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        Path(path).write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def opened_browser():
    """Start chromedriver on a free port of this machine, and a browser; both end with the block."""
    process = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        said = (re.search(r"successfully on port (\d+)", line) for line in process.stdout)
        port = next(found[1] for found in said if found)
        host = http.client.HTTPConnection("127.0.0.1", int(port), timeout=300)
        options = {"binary": CHROMIUM, "args": list(ARGUMENTS)}
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
            "timeouts": {"script": 120_000, "pageLoad": 240_000},
        }
        host.request("POST", "/session", json.dumps({"capabilities": {"alwaysMatch": wanted}}))
        session = json.loads(host.getresponse().read())["value"]["sessionId"]
        try:
            yield Browser(host, session)
        finally:
            host.request("DELETE", f"/session/{session}")
            host.getresponse().read()
            host.close()
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()
