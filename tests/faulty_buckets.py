"""A proxy before each object store of `buckets`, which injects failures.

Clients see them as they would from a real store: refusals (429, 503), connections that
break within a request or an answer, answers that are lost or late, and lists that do
not show new objects yet.
"""

import contextlib
import dataclasses
import http.client
import json
import pathlib
import random
import re
import threading
import time
import urllib.parse
from http import server as http_server

from tests import buckets

# Kinds of faults.
BUSY = "429"
UNAVAILABLE = "503"
CUT_UPLOAD = "a request of which half arrives"
CUT_ANSWER = "an answer of which half arrives"
LOST_ANSWER = "a request that is carried out, and not answered"
LATE = "an answer that takes long"
# Those of an outage.
FORBIDDEN = "403"
HELD = "a request that waits for the end of the outage"
ALL = (BUSY, UNAVAILABLE, CUT_UPLOAD, CUT_ANSWER, LOST_ANSWER, LATE)

_WRITES = ("PUT", "POST", "PATCH")
# The message and the code of S3 for each status.
_REASONS = {
    403: ("Access Denied", "AccessDenied"),
    429: ("slow down", "TooManyRequests"),
    503: ("try again", "SlowDown"),
}
_MOMENT_SECS = 0.02
_HOPS = {"connection", "transfer-encoding", "keep-alive", "content-length", "expect"}


@dataclasses.dataclass
class Faults:
    """The failures that a proxy injects, and how often each happened.

    Attributes:
      share: of the requests that fail, from 0 to 1.
      kinds: the failures to choose from.
      late_secs: how long a late answer takes.
      lag_secs: how long new objects are missing from lists, from the first list on that
        would have them.
      seed: of the choice of requests and failures.
      outage: while this file is there, all uploads fail.
      outage_kind: how they fail.
      happened: the count of each kind; `lag` counts entries that lists lacked.
    """

    share: float = 0.0
    kinds: tuple[str, ...] = ALL
    late_secs: float = 0.5
    lag_secs: float = 0.0
    seed: int = 0
    outage: pathlib.Path | None = None
    outage_kind: str = UNAVAILABLE
    happened: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()
        # Until when lists lack each object; None before its first list.
        self._hidden: dict[str, float | None] = {}

    @property
    def is_outage(self) -> bool:
        return self.outage is not None and self.outage.exists()

    def next(self, command: str) -> str | None:
        if command in _WRITES and self.is_outage:
            self.count(self.outage_kind)
            return self.outage_kind
        with self._lock:
            if self._random.random() >= self.share:
                return None
            kind = self._random.choice(self.kinds)
        self.count(kind)
        return kind

    def count(self, kind: str) -> None:
        with self._lock:
            self.happened[kind] = self.happened.get(kind, 0) + 1

    def wrote(self, name: str) -> None:
        with self._lock:
            self._hidden.setdefault(name, None if self.lag_secs else 0.0)

    def hides(self, name: str) -> bool:
        """Whether an object, or all objects of a prefix, are too new for a list."""
        now = time.monotonic()
        with self._lock:
            names = [
                each
                for each in self._hidden
                if each == name or (name.endswith("/") and each.startswith(name))
            ]
            for each in names:
                if self._hidden[each] is None:
                    self._hidden[each] = now + self.lag_secs
            return bool(names) and min(self._hidden[each] for each in names) > now


class _Handler(http_server.BaseHTTPRequestHandler):
    """Subclasses have the address of a store as `upstream`, `faults` and `is_gcs`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle_any(self):
        fault = self.faults.next(self.command)
        if fault == CUT_UPLOAD:
            self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
            self.close_connection = True
            return
        body = self._body()
        if fault in (BUSY, UNAVAILABLE, FORBIDDEN):
            self._refuse(int(fault))
            return
        while fault == HELD and self.faults.is_outage:
            time.sleep(_MOMENT_SECS)
        status, headers, content = self._forwarded(body)
        if status < 300 and self.command in ("PUT", "POST"):
            self._note(body)
        if self.faults.lag_secs and status == 200 and self.command == "GET":
            content = self._with_lag(content)
        if fault == LATE:
            time.sleep(self.faults.late_secs)
        if fault == LOST_ANSWER:
            self.close_connection = True
            return
        self._answer(status, headers, content, is_cut=fault == CUT_ANSWER)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any

    def log_message(self, *_):
        pass

    def _body(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _forwarded(self, body):
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOPS}
        connection = http.client.HTTPConnection(*self.upstream)
        with contextlib.closing(connection):
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _refuse(self, status):
        reason, code = _REASONS[status]
        if self.is_gcs:
            error = {"error": {"code": status, "message": reason}}
            kind, content = "application/json", json.dumps(error).encode()
        else:
            kind = "application/xml"
            content = f"<Error><Code>{code}</Code><Message>{reason}</Message></Error>"
            content = content.encode()
        self._answer(status, [("Content-Type", kind)], content)

    def _answer(self, status, headers, content, *, is_cut=False):
        self.send_response(status)
        is_head = self.command == "HEAD"
        sizes = [value for name, value in headers if name.lower() == "content-length"]
        for name, value in headers:
            if name.lower() not in _HOPS:
                self.send_header(name, value)
        size = sizes[0] if is_head and sizes else str(len(content))
        if status != 204:
            self.send_header("Content-Length", size)
        self.end_headers()
        if is_cut:
            content = content[: len(content) // 2]
            self.close_connection = True
        if not is_head:
            self.wfile.write(content)

    def _note(self, body):
        path, _, query = self.path.partition("?")
        if not self.is_gcs:
            self.faults.wrote(urllib.parse.unquote(path[1:].partition("/")[2]))
            return
        name = urllib.parse.parse_qs(query).get("name", [None])[0]
        if name is None and (match := re.search(rb'"name":\s*"([^"]*)"', body)):
            name = match[1].decode()
        if name is not None:
            self.faults.wrote(name)

    def _with_lag(self, content):
        path, _, query = self.path.partition("?")
        if path.endswith("/o"):
            listed = json.loads(content)
            items = listed.get("items", [])
            shown = [each for each in items if not self.faults.hides(each["name"])]
            prefixes = listed.get("prefixes", [])
            kept = [each for each in prefixes if not self.faults.hides(each)]
            if (shown, kept) != (items, prefixes):
                self.faults.count("lag")
            return json.dumps(listed | {"items": shown, "prefixes": kept}).encode()
        if "list-type" in query:
            content = _ENTRY.sub(self._shown, content)
            count = b"<KeyCount>%d</KeyCount>" % len(_ENTRY.findall(content))
            return re.sub(rb"<KeyCount>\d+</KeyCount>", count, content)
        return content

    def _shown(self, entry):
        name = re.search(rb"<(?:Key|Prefix)>([^<]*)<", entry[0])[1].decode()
        if self.faults.hides(urllib.parse.unquote(name)):
            self.faults.count("lag")
            return b""
        return entry[0]


# An object or a prefix in a list of S3.
_ENTRY = re.compile(rb"<(Contents|CommonPrefixes)>.*?</\1>", re.DOTALL)


@contextlib.contextmanager
def before(stores, faults):
    """Proxies before the stores of an environment; yields the one with the proxies.

    Args:
      stores: the environment of clients of `buckets.serving`.
      faults: of both stores.
    """
    gcs, s3 = stores["STORAGE_EMULATOR_HOST"], stores["AWS_ENDPOINT_URL"]
    with (
        buckets.served(_proxy(gcs, faults, is_gcs=True)) as gcs_url,
        buckets.served(_proxy(s3, faults, is_gcs=False)) as s3_url,
    ):
        yield {
            **stores,
            "STORAGE_EMULATOR_HOST": gcs_url,
            "TENSORSTORE_GCS_HTTP_URL": gcs_url,
            "AWS_ENDPOINT_URL": s3_url,
        }


def _proxy(url, faults, *, is_gcs):
    address = urllib.parse.urlsplit(url)
    upstream = (address.hostname, address.port)
    own = {"upstream": upstream, "faults": faults, "is_gcs": is_gcs}
    return type("Handler", (_Handler,), own)
