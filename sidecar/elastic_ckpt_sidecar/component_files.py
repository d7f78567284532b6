"""Files of components that live in the head, on their way to a host's memory and back.

What runs beside the hosts writes its files there, and they do not pass through the
head. A component of plain Python is in the head, and so are its files: they are small,
and travel in letters, unless the head sees the memory of host 0 itself.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence

from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.host.saver import HostSaver

Files = dict[str, str]


class ComponentFiles:
    """Phases by which a host takes and gives files of components.

    Args:
      saver: of the host.
    """

    def __init__(self, saver: HostSaver) -> None:
        self._saver = saver

    def put(self, step: int, save: str, files: Mapping[str, str]) -> None:
        """Writes files into a step that is being saved, as `taken` gave them."""
        write(self._saver.directory(step, save), files)

    def get(self, directory: str) -> Files:
        """The files below a directory."""
        return read(directory)


def read(directory: epath.PathLike) -> Files:
    """The files below a directory: by path, what they hold, in base 64."""
    found = {}
    for parent, _, names in os.walk(directory):
        for name in names:
            path = epath.Path(parent) / name
            relative = os.path.relpath(path, directory)
            found[relative] = base64.b64encode(path.read_bytes()).decode()
    return found


def write(directory: epath.PathLike, files: Mapping[str, str]) -> None:
    """Writes what `read` found below another directory."""
    storage.make_directory(directory)
    for relative, text in files.items():
        storage.write_atomic(
            os.path.join(directory, relative), base64.b64decode(text, validate=True)
        )


def take(directory: epath.PathLike, components: Sequence[str]) -> Files:
    """What components have written below a directory, which is removed."""
    found = {
        f"{component}/{relative}": text
        for component in components
        for relative, text in read(os.path.join(directory, component)).items()
    }
    storage.remove(directory)
    return found
