"""A relay in front of an agent: it counts the bytes that its clients receive."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.parse
from types import TracebackType


class Relay:
    """Passes the connections of its clients on to `url`, while its block lasts.

    Attributes:
      url: of the relay.
      num_bytes: that its clients have received so far, headers included.
    """

    def __init__(self, url: str) -> None:
        behind = urllib.parse.urlsplit(url)
        assert behind.hostname is not None
        assert behind.port is not None
        self._behind = behind.hostname, behind.port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Relay:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()
        for each in [*self._open, self._listening]:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            agent = socket.create_connection(self._behind)
            self._open += [client, agent]
            for source, target in ((client, agent), (agent, client)):
                thread = threading.Thread(
                    target=self._pass_on, args=(source, target, source is agent)
                )
                self._threads.append(thread)
                thread.start()

    def _pass_on(
        self, source: socket.socket, target: socket.socket, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(2**18):
                if is_answer:
                    with self._lock:
                        self.num_bytes += len(piece)
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
