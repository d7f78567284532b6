"""Copies files of components between a head and host 0, whose memory is not shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_ckpt.core import storage
from elastic_ckpt.host import read_requests, save_requests
from elastic_ckpt_sidecar import array_requests, component_files


class FileCopies:
    """Copies files before and after the requests that use them.

    Args:
      first: runs a request on host 0.
    """

    def __init__(self, first: Callable[[Any], Any]) -> None:
        self._first = first
        self._captured: dict[tuple[int, str], str] = {}
        self._restored: list[str] = []

    def before(self, request: Any) -> None:
        """Sends host 0 the files that components of the head have written."""
        match request:
            case save_requests.WriteStep(step=step, save=save):
                directory = self._captured.pop((step, save))
                files = component_files.take(directory, request.components)
                if files and request.problem is None:
                    self._first(
                        array_requests.PutFiles(step=step, save=save, files=files)
                    )

    def after(self, request: Any, answers: list[Any]) -> None:
        """Receives the files that components of the head will read."""
        match request:
            case array_requests.CaptureArrays(step=step, save=save):
                self._captured[step, save] = answers[0]
            case read_requests.MaterialiseComponent():
                self._restored.append(answers[0])
                files = self._first(array_requests.GetFiles(directory=answers[0]))
                component_files.write(answers[0], files)
            case read_requests.CloseStep():
                while self._restored:
                    storage.remove(self._restored.pop())
