"""Copies files of components between a head and host 0, whose memory is not shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.core import storage
from elastic_ckpt.core.calls import Call
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt_sidecar import component_files
from elastic_ckpt_sidecar.component_files import ComponentFiles
from elastic_ckpt_sidecar.host_arrays import HostArrays


class FileCopies:
    """Copies files before and after the calls that use them.

    Args:
      first: calls a method of host 0.
    """

    def __init__(self, first: Callable[..., Any]) -> None:
        self._first = first
        self._captured: dict[StepId, str] = {}
        self._restored: list[str] = []

    def before(self, call: Call, arguments: Mapping[str, Any]) -> None:
        """Sends host 0 the files that components of the head have written."""
        if call.method is HostSaver.write:
            step_id = arguments["step_id"]
            directory = self._captured.pop(step_id, None)
            if directory is None:
                # Its capture has failed, which `problem` reports to the hosts.
                return
            files = component_files.take(directory, arguments["components"])
            if files and arguments["problem"] is None:
                self._first(ComponentFiles.put, step_id, files)

    def after(
        self, call: Call, arguments: Mapping[str, Any], answers: list[Any]
    ) -> None:
        """Receives the files that components of the head will read."""
        if call.method is HostArrays.capture:
            self._captured[arguments["step_id"]] = answers[0]
        elif call.method is HostReader.materialise:
            self._restored.append(answers[0])
            files = self._first(ComponentFiles.get, answers[0])
            component_files.write(answers[0], files)
        elif call.method is HostReader.close_step:
            while self._restored:
                storage.remove(self._restored.pop())
