"""A peer that answers each request as its test defines."""

import contextlib
import socket
import threading


class ScriptedPeer:
    """Accepts connections while its `with` block lasts.

    `respond(connection, request)` answers a request; the connection then stays open,
    if it does not close it. `requests` are those received, `over` is set at the end.
    """

    def __init__(self, respond):
        self._respond = respond
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept)]
        self._connections = []
        self.requests = []
        self.over = threading.Event()
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self):
        self._threads[0].start()
        return self

    def __exit__(self, *_):
        self.over.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        # The thread that accepts adds to both lists, until it has ended.
        self._threads[0].join()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for connection in self._connections:
            connection.close()
        self._listening.close()

    @property
    def num_connections(self):
        return len(self._connections)

    def _accept(self):
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self._connections.append(connection)
            thread = threading.Thread(target=self._talk, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _talk(self, connection):
        with contextlib.suppress(OSError):
            while True:
                request = b""
                while not request.endswith(b"\r\n\r\n"):
                    if not (piece := connection.recv(2**16)):
                        return
                    request += piece
                self.requests.append(request)
                self._respond(connection, request)


def answer(body, *, status="200 OK", headers=()):
    """A response as it should be."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def wanted_range(request):
    """The first and the last byte that a request asks for."""
    (line,) = [
        line for line in request.decode().split("\r\n") if line.startswith("Range: ")
    ]
    first, last = line.removeprefix("Range: bytes=").split("-")
    return int(first), int(last)
