"""The structure of a file of `torch.save`, and where its tensors lie; no values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from concurrent import futures
from typing import Any

from etils import epath

from elastic_ckpt.universal.formats import coverage, inert_names, torch_zip
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.stored_zip import StoredZip
from elastic_ckpt.universal.formats.torch_tensor import Tensor
from elastic_ckpt.universal.stored import Fragment

# Files of a bucket take long to answer.
_THREADS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchFile:
    """A file that was read and closed.

    Attributes:
      path: its path or URL.
      value: dicts, lists, numbers and texts; `Tensor`s that cannot be read anymore.
    """

    path: str
    value: Any

    def at(self, *keys: str) -> Any:
        """The value under nested dicts; None if one of them lacks the key."""
        value = self.value
        for key in keys:
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value

    def dict_at(self, *keys: str) -> dict[Any, Any]:
        """The dict under nested dicts.

        Raises:
          FormatError: if there is none.
        """
        return self._of_type(dict, "dict", keys)

    def list_at(self, *keys: str) -> list[Any]:
        """The list under nested dicts.

        Raises:
          FormatError: if there is none.
        """
        return self._of_type(list, "list", keys)

    def _of_type(self, kind: type, name: str, keys: tuple[str, ...]) -> Any:
        value = self.at(*keys)
        if not isinstance(value, kind):
            raise self.error(f"has no {name} {'/'.join(keys) or 'at its top'}")
        return value

    def error(self, what: str) -> FormatError:
        """An error that names the file; `what` continues its sentence."""
        return FormatError(f"{self.path} {what}")

    def fragment(self, tensor: Tensor) -> tuple[Fragment, ...]:
        """The place of a tensor: one fragment, or none if it is empty."""
        if 0 in tensor.shape:
            return ()
        return (
            Fragment(
                box=coverage.whole(tensor.shape),
                file=self.path,
                offset=tensor.file_offset,
                strides=tensor.byte_strides,
            ),
        )


def read(path: epath.PathLike) -> TorchFile:
    """The structure of a file.

    Raises:
      FormatError: as `torch_zip.TorchZip`.
    """
    with torch_zip.TorchZip(path, names=inert_names.NAMES) as file:
        return TorchFile(path=str(path), value=file.value)


def read_all(paths: Mapping[Any, epath.Path]) -> dict[Any, TorchFile]:
    """The structures of files, by the keys of `paths`.

    Raises:
      FormatError: as `read`.
    """
    with futures.ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(paths, threads.map(read, paths.values()), strict=True))


def verify(path: str) -> bool:
    """Compares the CRC-32 of everything in a file; True, as it has them.

    Raises:
      FormatError: if a part of the file has another one.
    """
    file = StoredZip(path, writer="torch.save")
    try:
        for name in file.names():
            file.read(name, 0, 0)
    finally:
        file.close()
    return True


def tensors_of(value: Any) -> Iterable[tuple[str, Tensor]]:
    """The tensors of a flat state dict, by name."""
    if isinstance(value, dict):
        for name, each in value.items():
            if isinstance(each, Tensor) and isinstance(name, str):
                yield name, each
