"""Files of components that live in the head, copied to a host's memory and back.

Components beside the hosts write their files there, and these do not pass through the
head. A component of plain Python is in the head, and so are its files. They are small,
and are copied in messages, unless the head shares the memory of host 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from etils import epath

from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.core import calls, storage
from elastic_ckpt.steps.step_id import StepId


def read(directory: epath.PathLike) -> dict[str, bytes]:
    """Returns the content of the files below a directory, by path."""
    contents = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            path = epath.Path(parent) / name
            contents[os.path.relpath(path, directory)] = path.read_bytes()
    return contents


def write(directory: epath.PathLike, contents: Mapping[str, bytes]) -> None:
    """Writes what `read` returned below another directory."""
    storage.make_directory(directory)
    for relative, content in contents.items():
        storage.write_atomic(os.path.join(directory, relative), content)


def take(directory: epath.PathLike, components: Sequence[str]) -> dict[str, bytes]:
    """Returns the files of components below a directory, which is removed."""
    contents = {
        f"{component}/{relative}": content
        for component in components
        for relative, content in read(os.path.join(directory, component)).items()
    }
    storage.remove(directory)
    return contents


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
        write(self._saver.directory(step_id), files)

    @calls.call()
    def get(self, directory: str) -> Mapping[str, bytes]:
        """Returns the content of the files below a directory of the host, by path."""
        return read(directory)
