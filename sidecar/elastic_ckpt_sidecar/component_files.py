"""Files of components that live in the head, copied to a host's memory and back.

Components beside the hosts write their files there, and these do not pass through the
head. A component of plain Python is in the head, and so are its files. They are small,
and are copied in messages, unless the head shares the memory of host 0.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from etils import epath

from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.core import calls, storage
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt_sidecar.host_arrays import HostArrays


class ComponentFiles:
    """The files of components on a host, for a head that has not its memory.

    Args:
      saver: of the host.
    """

    def __init__(self, saver: HostSaver) -> None:
        self._saver = saver

    @calls.call()
    def put(self, step_id: StepId, files: Mapping[str, bytes]) -> None:
        """Writes files into a step that is being saved.

        Args:
          step_id: the step.
          files: by path in the step, their content.
        """
        _write(self._saver.directory(step_id), files)

    @calls.call()
    def get(self, directory: str) -> Mapping[str, bytes]:
        """Returns the content of the files below a directory of the host, by path."""
        return _read(directory)


class FileCopies:
    """Copies files before and after the calls that use them.

    Args:
      first: calls a method of host 0.
    """

    def __init__(self, first: Callable[..., Any]) -> None:
        self._first = first
        self._captured: dict[StepId, str] = {}
        self._restored: list[str] = []

    def before(self, call: calls.Call, arguments: Mapping[str, Any]) -> None:
        """Sends host 0 the files that components of the head have written."""
        if call.method is not HostSaver.write:
            return
        step_id = arguments["step_id"]
        directory = self._captured.pop(step_id, None)
        if directory is None:
            # Its capture has failed, which `problem` reports to the hosts.
            return
        files = {
            f"{component}/{relative}": content
            for component in arguments["components"]
            for relative, content in _read(os.path.join(directory, component)).items()
        }
        storage.remove(directory)
        if files and arguments["problem"] is None:
            self._first(ComponentFiles.put, step_id, files)

    def after(
        self, call: calls.Call, arguments: Mapping[str, Any], answers: list[Any]
    ) -> None:
        """Receives the files that components of the head will read."""
        if call.method is HostArrays.capture:
            self._captured[arguments["step_id"]] = answers[0]
        elif call.method is HostReader.materialise:
            self._restored.append(answers[0])
            _write(answers[0], self._first(ComponentFiles.get, answers[0]))
        elif call.method is HostReader.close_step:
            while self._restored:
                storage.remove(self._restored.pop())


def _read(directory: epath.PathLike) -> dict[str, bytes]:
    # The content of the files below a directory, by path.
    top = pathlib.Path(directory)
    files = [path for path in top.rglob("*") if path.is_file()]
    return {str(path.relative_to(top)): path.read_bytes() for path in files}


def _write(directory: epath.PathLike, contents: Mapping[str, bytes]) -> None:
    storage.make_directory(directory)
    for relative, content in contents.items():
        storage.write_atomic(os.path.join(directory, relative), content)
