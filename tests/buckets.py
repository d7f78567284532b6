"""Object stores on this machine: a bucket at `gs://` and one at `s3://`, in threads.

`gcp_storage_emulator` and `moto` answer; what the first lacks, and TensorStore needs,
is added here: generations of objects, writes on condition, and listings of a range.
"""

import contextlib
import io
import json
import logging
import re
import sys
import threading
import time
import urllib.parse
from http import server as http_server
from unittest import mock

import boto3
import gcp_storage_emulator.server as gcs_emulator
import moto.server
from gcp_storage_emulator import exceptions
from gcp_storage_emulator.handlers import buckets as gcs_buckets

BUCKET = "bucket"


class _Gcs(gcs_emulator.RequestHandler):
    """The emulator's requests with what it lacks."""

    protocol_version = "HTTP/1.1"
    # Pieces that wait for each other cost 40 ms each.
    disable_nagle_algorithm = True
    _generation = None

    def handle_one_request(self):
        self._generation = None
        super().handle_one_request()

    def do_GET(self):
        bucket, name, query = self._asked()
        if bucket and name is None:
            self._answer(200, json.dumps(self._listed(bucket, query)).encode())
        elif name is not None and query.get("alt") == ["media"]:
            self._generation = self._current(bucket, name)
            if self._is_as_expected(query, self._generation, otherwise=304):
                super().do_GET()
        else:
            super().do_GET()

    def do_POST(self):
        bucket, _, query = self._asked()
        name = query.get("name", [None])[0]
        connection = self.rfile
        if bucket and query.get("uploadType") == ["multipart"]:
            # The name is in the content.
            content = connection.read(int(self.headers["Content-Length"]))
            name = json.loads(re.search(rb"\{.*\}", content)[0])["name"]
            self.rfile = io.BytesIO(content)
        try:
            if not (bucket and name) or self._is_as_expected(
                query, self._current(bucket, name), otherwise=412
            ):
                super().do_POST()
        finally:
            self.rfile = connection

    def do_DELETE(self):
        bucket, name, query = self._asked()
        if self._is_as_expected(query, self._current(bucket, name), otherwise=412):
            super().do_DELETE()

    def end_headers(self):
        if self._generation is not None:
            self.send_header("x-goog-generation", str(self._generation))
        super().end_headers()

    def log_message(self, *_):
        pass

    def _asked(self):
        # The bucket, the object, and the query; None for what a path does not name.
        path, _, query = self.path.partition("?")
        _, bucket_is_given, rest = path.partition("/b/")
        bucket, _, name = rest.partition("/o")
        is_of_objects = bucket_is_given and "/o" in rest
        name = urllib.parse.unquote(name[1:]) if name else None
        return (
            bucket if is_of_objects else None,
            name,
            urllib.parse.parse_qs(query, keep_blank_values=True),
        )

    def _current(self, bucket, name):
        # The generation of an object; 0 if there is none.
        try:
            return int(self.storage.get_file_obj(bucket, name)["generation"])
        except exceptions.NotFound:
            return 0

    def _is_as_expected(self, query, current, *, otherwise):
        wanted = query.get("ifGenerationMatch")
        unwanted = query.get("ifGenerationNotMatch")
        if (wanted and int(wanted[0]) != current) or (
            unwanted and int(unwanted[0]) == current
        ):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._answer(otherwise, b"")
            return False
        return True

    def _listed(self, bucket, query):
        def given(key):
            return query.get(key, [""])[0]

        blobs, prefixes = self.storage.get_file_list(
            bucket, given("prefix") or None, given("delimiter") or None, None
        )
        start, end = given("startOffset"), given("endOffset")
        return {
            "kind": "storage#objects",
            "prefixes": sorted(prefixes or ()),
            "items": [
                each
                for each in blobs
                if start <= each["name"] and (not end or each["name"] < end)
            ],
        }

    def _answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(http_server.ThreadingHTTPServer):
    """Many clients connect at once, and are killed in the middle of a request."""

    # Connections beyond these may be lost, and their clients wait for minutes.
    request_queue_size = 128

    def handle_error(self, request, client_address):
        """Reports errors but for those of cut connections."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def served(handler):
    """Answers requests by a handler, in threads; yields the server's url."""
    with Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def serving(late_secs=0.0):
    """Both stores, each with a `BUCKET`; yields the environment of their clients.

    That at `gs://` answers each request after `late_secs`.
    """
    with _gcs(late_secs) as gcs_url, _s3() as s3_url:
        yield {
            # Read by epath and gcsfs, and by TensorStore.
            "STORAGE_EMULATOR_HOST": gcs_url,
            "TENSORSTORE_GCS_HTTP_URL": gcs_url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "AWS_ENDPOINT_URL": s3_url,
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_REGION": "us-east-1",
        }


@contextlib.contextmanager
def _gcs(late_secs):
    storage = gcs_emulator.Storage(use_memory_fs=True)
    gcs_buckets.create_bucket(BUCKET, storage)
    lock = threading.Lock()

    class Handler(_Gcs):
        def __init__(self, *arguments):
            self.storage = storage
            http_server.BaseHTTPRequestHandler.__init__(self, *arguments)

        def __getattribute__(self, name):
            attribute = super().__getattribute__(name)
            if name.startswith("do_"):
                return _locked(attribute, lock, late_secs)
            return attribute

    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    with served(Handler) as url:
        yield url


def _locked(act, lock, late_secs):
    def locked():
        time.sleep(late_secs)
        with lock:
            act()

    return locked


class _S3(moto.server.DomainDispatcherApplication):
    """Answers requests one by one: moto's writes on condition are not atomic."""

    lock = threading.Lock()

    def __call__(self, *arguments):
        with self.lock:
            return super().__call__(*arguments)


@contextlib.contextmanager
def _s3():
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    serving = moto.server.ThreadedMotoServer(
        ip_address="127.0.0.1", port=0, verbose=False
    )
    with mock.patch.object(moto.server, "DomainDispatcherApplication", _S3):
        serving.start()
    try:
        host, port = serving.get_host_and_port()
        url = f"http://{host}:{port}"
        boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="none",
            aws_secret_access_key="none",
        ).create_bucket(Bucket=BUCKET)
        yield url
    finally:
        serving.stop()
