"""A container of Azure's blob storage on this machine: as much of it as is read."""

import contextlib
import email.utils
import hashlib
import re
import threading
import urllib.parse
from http import server as http_server
from xml.sax import saxutils

from tests import buckets

ACCOUNT = "account"
# Any text in base64: nothing is checked.
_KEY = "bm9uZQ=="
_WRITTEN = email.utils.formatdate(1_700_000_000, usegmt=True)


class _Handler(http_server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def do_GET(self):
        path, _, query = self.path.partition("?")
        given = urllib.parse.parse_qs(query)
        _, _, container, *name = urllib.parse.unquote(path).split("/", 3)
        if given.get("comp") == ["list"]:
            self._answer(200, self._listed(given), {"Content-Type": "application/xml"})
        elif not name:
            self._answer(200, b"", _properties(container.encode()))
        elif (content := self.objects.get(f"{container}/{name[0]}")) is None:
            self._answer(404, b"", {"x-ms-error-code": "BlobNotFound"})
        else:
            self._answer_part(content)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass

    def _answer_part(self, content):
        properties = _properties(content)
        given = self.headers.get("x-ms-range") or self.headers.get("Range")
        if given is None:
            self._answer(200, content, properties)
            return
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", given).groups()
        stop = min(int(last) + 1, len(content)) if last else len(content)
        part = f"bytes {first}-{stop - 1}/{len(content)}"
        properties["Content-Range"] = part
        self._answer(206, content[int(first) : stop], properties)

    def _listed(self, given):
        _, _, container = urllib.parse.urlsplit(self.path).path.split("/")
        prefix = given.get("prefix", [""])[0]
        delimiter = given.get("delimiter", [None])[0]
        blobs, prefixes = [], set()
        for path, content in sorted(self.objects.items()):
            name = path.removeprefix(f"{container}/")
            below, is_deeper, _ = name[len(prefix) :].partition(delimiter or "\0")
            if name == path or not name.startswith(prefix):
                continue
            if is_deeper:
                prefixes.add(prefix + below + delimiter)
            else:
                blobs.append(_entry("Blob", name, _properties(content)))
        blobs += [_entry("BlobPrefix", name, {}) for name in sorted(prefixes)]
        return (
            '<?xml version="1.0" encoding="utf-8"?>'
            f'<EnumerationResults ContainerName="{container}">'
            f"<Blobs>{''.join(blobs)}</Blobs><NextMarker/></EnumerationResults>"
        ).encode()

    def _answer(self, status, content, headers):
        self.send_response(status)
        for name, value in headers.items():
            if name != "Content-Length":
                self.send_header(name, value)
        size = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", size or str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _properties(content):
    return {
        "Content-Length": str(len(content)),
        "Content-Type": "application/octet-stream",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
        "Last-Modified": _WRITTEN,
        "x-ms-blob-type": "BlockBlob",
    }


def _entry(kind, name, properties):
    of_list = {"ETag": "Etag", "x-ms-blob-type": "BlobType"}
    fields = "".join(
        f"<{of_list.get(key, key)}>{saxutils.escape(value)}</{of_list.get(key, key)}>"
        for key, value in properties.items()
    )
    name = saxutils.escape(name)
    return f"<{kind}><Name>{name}</Name><Properties>{fields}</Properties></{kind}>"


@contextlib.contextmanager
def serving(objects):
    """Serves objects by `container/name`; yields the environment of a client."""

    class Handler(_Handler):
        pass

    Handler.objects = objects
    with buckets.Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_address[1]}/{ACCOUNT}"
        fields = (
            "DefaultEndpointsProtocol=http",
            f"AccountName={ACCOUNT}",
            f"AccountKey={_KEY}",
            f"BlobEndpoint={endpoint}",
        )
        try:
            yield {"AZURE_STORAGE_CONNECTION_STRING": ";".join(fields)}
        finally:
            server.shutdown()
            thread.join()
