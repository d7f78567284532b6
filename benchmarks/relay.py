"""A relay in front of an agent that counts the bytes that its clients receive."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import urllib.parse
from typing import Any


class Relay:
    """Forwards clients' connections to `url` until the end of the block.

    Attributes:
      url: the relay's URL.
      num_bytes: the number of bytes that clients have received, including headers.
    """

    def __init__(self, url: str) -> None:
        behind = urllib.parse.urlsplit(url)
        address = (behind.hostname, behind.port)
        relay = self

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with socket.create_connection(address) as agent:
                    relay._open += [self.request, agent]
                    asking = threading.Thread(
                        target=_pass_on, args=(self.request, agent)
                    )
                    asking.start()
                    _pass_on(agent, self.request, relay._count)
                    asking.join()

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connection)
        self._serving = threading.Thread(target=self._server.serve_forever)
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}{behind.path}"
        self.num_bytes = 0

    def __enter__(self) -> Relay:
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        # Waits for the threads of all connections.
        self._server.server_close()
        self._serving.join()

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes


def _pass_on(source: Any, target: Any, count: Any = lambda _: None) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(2**18):
            count(len(piece))
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
