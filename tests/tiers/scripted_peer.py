"""A peer that answers each request as its test defines."""

import contextlib
import socket
import socketserver
import threading


class ScriptedPeer(socketserver.ThreadingTCPServer):
    """Accepts connections while its `with` block lasts.

    `respond(connection, request)` answers a request, or it is what is sent each time;
    the connection then stays open. `requests` are those received.
    """

    def __init__(self, respond):
        super().__init__(("127.0.0.1", 0), None)
        always = lambda connection, _: connection.sendall(respond)  # noqa: E731
        self._respond = respond if callable(respond) else always
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.connections, self.requests = [], []

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self._thread.join()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        # Waits for the threads of the connections.
        self.server_close()

    def process_request(self, connection, address):
        self.connections.append(connection)
        super().process_request(connection, address)

    def finish_request(self, connection, _):
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
    (line,) = (line for line in request.split(b"\r\n") if line.startswith(b"Range: "))
    return tuple(map(int, line.removeprefix(b"Range: bytes=").split(b"-")))
