"""A real browser without a window: Chromium, over the pipe of its DevTools."""

import contextlib
import json
import os
import shutil
import subprocess

# Chromium and its sandbox need other users and namespaces than containers have.
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_REMEDY = "no Chromium on the PATH: apt-get install -y chromium"
_ROWS = """
new Promise(resolve => {
  const image = new Image();
  image.onload = () => {
    const canvas = document.createElement('canvas');
    canvas.width = image.width; canvas.height = image.height;
    const drawing = canvas.getContext('2d');
    drawing.drawImage(image, 0, 0);
    const rows = [];
    for (let y = 0; y < image.height; y++) {
      const row = drawing.getImageData(0, y, image.width, 1).data;
      let sum = 0, squares = 0;
      for (let x = 1; x < row.length; x += 4) {
        sum += row[x]; squares += row[x] * row[x];
      }
      const mean = sum / image.width;
      rows.push([mean, Math.sqrt(Math.max(0, squares / image.width - mean * mean))]);
    }
    resolve(rows);
  };
  image.src = 'data:image/png;base64,%s';
})
"""


class Page:
    """One page; `messages` are what the browser complains about."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session = None
        self._events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call(
            "Target.attachToTarget", targetId=target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    @property
    def messages(self):
        """The texts of console messages, exceptions and failed requests."""
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        names += ("Log.entryAdded", "Network.loadingFailed")
        return [e for e in self._events if e["method"] in names]

    @property
    def requests(self):
        return [
            e["params"]["request"]["url"]
            for e in self._events
            if e["method"] == "Network.requestWillBeSent"
        ]

    def open(self, url, *, is_dark=False, width=1000):
        self._events.clear()
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {
            "name": "prefers-color-scheme",
            "value": "dark" if is_dark else "light",
        }
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        while not any(e["method"] == "Page.loadEventFired" for e in self._events):
            self._receive()

    def evaluate(self, expression):
        result = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]

    def screenshot(self):
        """The whole page, as PNG in base64."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "scale": 1, **{k: size[k] for k in ("width", "height")}}
        return self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip=clip
        )["data"]

    def rows(self, picture):
        """The mean and standard deviation of each row of a screenshot's green."""
        self.open("about:blank")
        return self.evaluate(_ROWS % picture)

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self):
        while b"\0" not in self._buffer:
            received = os.read(self._from, 2**16)
            assert received, "the browser has ended"
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self._events.append(message)
        return message


@contextlib.contextmanager
def page(directory):
    """A page of a new browser, whose files are in `directory`."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    assert program, _REMEDY
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The browser has its pipes at 3 and 4.
    browser = subprocess.Popen(
        [
            *("bash", "-c", f'exec "$@" 3<&{to_read} 4>&{from_write}', "bash"),
            *(program, *_FLAGS, "--remote-debugging-pipe"),
            f"--user-data-dir={directory}",
        ],
        pass_fds=(to_read, from_write),
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        opened = Page(to_write, from_read)
        yield opened
        opened._session = None
        opened.call("Browser.close")
        browser.wait(60)
    finally:
        os.close(to_write)
        os.close(from_read)
        browser.kill()
        browser.wait()
