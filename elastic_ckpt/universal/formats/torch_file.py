"""The structure of a file of `torch.save`, and where its tensors lie; no values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from concurrent import futures
from typing import Any

from etils import epath

from elastic_ckpt.universal.formats import (
    coverage,
    inert_names,
    plain_values,
    torch_zip,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.stored_zip import StoredZip
from elastic_ckpt.universal.formats.torch_tensor import Tensor
from elastic_ckpt.universal.stored import Fragment

# Files of a bucket take long to answer.
_THREADS = 8
# A stored tensor and its fragment, without their dims; each of the dims.
_TENSOR_BYTES = 400
_DIM_BYTES = 80


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchFile:
    """A file that was read and closed.

    Attributes:
      path: its path or URL.
      value: dicts, lists, numbers and texts; `Tensor`s that cannot be read anymore.
      budget: of the checkpoint.
    """

    path: str
    value: Any
    budget: SourceBudget = dataclasses.field(
        default_factory=SourceBudget, repr=False, compare=False
    )

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

    def take(self, num_bytes: int) -> None:
        """Counts memory that is allocated for what the file has.

        Raises:
          FormatError: if it is too much.
        """
        self.budget.take(num_bytes, self.path)

    def values(self, *, without: Collection[str] = ()) -> dict[str, Any]:
        """Its numbers and texts by path, see `plain_values.flatten`.

        Raises:
          FormatError: if they take too much memory.
        """
        return plain_values.flatten(
            self.value, file=self.path, without=without, budget=self.budget
        )

    def fragment(self, tensor: Tensor) -> tuple[Fragment, ...]:
        """The place of a tensor: one fragment, or none if it is empty.

        Raises:
          FormatError: if the tensors of the checkpoint take too much memory.
        """
        # A tensor may be referred to by many names.
        self.take(_TENSOR_BYTES + _DIM_BYTES * len(tensor.shape))
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


def read(path: epath.PathLike, budget: SourceBudget | None = None) -> TorchFile:
    """The structure of a file.

    Args:
      path: local, or in a bucket.
      budget: of the checkpoint; None if this is all that is read.

    Raises:
      FormatError: as `torch_zip.TorchZip`.
    """
    budget = budget or SourceBudget()
    with torch_zip.TorchZip(path, names=inert_names.NAMES, budget=budget) as file:
        return TorchFile(path=str(path), value=file.value, budget=budget)


def read_all(
    paths: Mapping[Any, epath.Path], budget: SourceBudget
) -> dict[Any, TorchFile]:
    """The structures of files, by the keys of `paths`.

    Raises:
      FormatError: as `read`.
    """
    with futures.ThreadPoolExecutor(_THREADS) as threads:
        reading = threads.map(lambda path: read(path, budget), paths.values())
        return dict(zip(paths, reading, strict=True))


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
