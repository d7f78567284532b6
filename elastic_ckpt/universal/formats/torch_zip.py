"""Reads files of `torch.save` without torch, and without running anything in them.

Such a file is a zip of uncompressed entries: `data.pkl`, a pickle in which tensors are
views of storages, and `data/<key>`, the bytes of each storage. The pickle is decoded by
`closed_pickle`, with the names of `torch_names`. A tensor becomes a `Tensor`, a record
that reads its values when it is asked for them: memory holds one tensor at a time.

Nothing in the file is trusted. Entries must be uncompressed, lie inside the file and
not overlap; a tensor must lie inside its storage and may not be larger than it; the
bytes of an entry must have its CRC-32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.universal.formats import closed_pickle, torch_names, torch_tensor
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.stored_zip import StoredZip
from elastic_ckpt.universal.formats.torch_tensor import Tensor

MOST_PICKLE_BYTES = 256 << 20

# torch.save writes 3; later numbers are TorchScript's.
_VERSIONS = range(1, 11)
# The version and the byte order are short.
_MOST_TEXT_BYTES = 100
# Bytes of tensors, over those of their file: a few may share a storage.
_MOST_SHARING = 4


class TorchZip:
    """A file of `torch.save` that is open for reading; a context manager.

    Args:
      path: local, or in a bucket.
      names: beside those of PyTorch, see `closed_pickle.decode`.
      span: the first byte of the zip and its size, if it is a part of the file.
      budget: of its checkpoint; None if this is all that is read.

    Attributes:
      value: the content: dicts, lists, tuples, texts, numbers, None and `Tensor`s.
      num_bytes: the size of the file.

    Raises:
      FormatError: if it is no such file, damaged, or made to exhaust memory.
    """

    def __init__(
        self,
        path: epath.PathLike,
        *,
        names: Mapping[str, Any] | None = None,
        span: tuple[int, int] | None = None,
        budget: SourceBudget | None = None,
    ) -> None:
        self._zip = StoredZip(path, writer="torch.save", span=span)
        self._budget = budget or SourceBudget()
        self._budget.add_file(self._zip.stored_bytes)
        self._names = {**torch_names.NAMES, **(names or {})}
        self.num_bytes = self._zip.num_bytes
        try:
            self._prefix = self._checked_prefix()
            self.value: Any = self._decoded()
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> TorchZip:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def _checked_prefix(self) -> str:
        # The directory that all entries are in, named after the file.
        path, names = self._zip.path, self._zip.names()
        pickles = [name for name in names if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise FormatError(f"{path} has no data.pkl; it is no file of torch.save")
        prefix = pickles[0].removesuffix("data.pkl")
        if prefix + "version" in names:
            version = self._short(prefix + "version").strip()
            if not version.isdigit() or int(version[:9]) not in _VERSIONS:
                raise FormatError(
                    f"{path} has version {version[:20]!r}, and this program reads"
                    f" {_VERSIONS[0]} to {_VERSIONS[-1]}; save it with an older torch"
                )
        if prefix + "byteorder" in names:
            order = self._short(prefix + "byteorder")
            if order != b"little":
                raise FormatError(
                    f"{path} has the byte order {order[:20]!r}; only little is read:"
                    " save it anew on a little-endian machine"
                )
        return prefix

    def _short(self, name: str) -> bytes:
        size = self._zip.size(name) or 0
        if size > _MOST_TEXT_BYTES:
            raise FormatError(
                f"{self._zip.path} has {size} bytes in {name}, and at most"
                f" {_MOST_TEXT_BYTES} are read"
            )
        return self._zip.read(name)

    def _decoded(self) -> Any:
        size = self._zip.size(self._prefix + "data.pkl") or 0
        most = min(MOST_PICKLE_BYTES, self._zip.stored_bytes)
        if size > most:
            raise FormatError(
                f"{self._zip.path} has a pickle of {size} bytes; at most {most} are"
                " read, of those that are no holes"
            )
        return closed_pickle.decode(
            self._zip.read(self._prefix + "data.pkl"),
            file=self._zip.path,
            names=self._names,
            persistent=torch_tensor.storages(self._zip, self._prefix),
            budget=self._budget,
        )


def read(path: epath.PathLike, budget: SourceBudget | None = None) -> Any:
    """The content of a file of `torch.save`, with arrays in place of tensors.

    Args:
      path: local, or in a bucket.
      budget: of its checkpoint; None if this is all that is read.

    Raises:
      FormatError: as `TorchZip`.
    """
    with TorchZip(path, budget=budget) as file:
        views = dict.fromkeys(tensor for _, tensor in tensors(file.value))
        num_bytes = sum(tensor.num_bytes for tensor in views)
        if num_bytes > _MOST_SHARING * file.num_bytes:
            raise FormatError(
                f"{path} has {num_bytes} bytes of tensors in {file.num_bytes} bytes:"
                " they overlap; clone them before they are saved"
            )
        return _with_arrays(file.value, {view: view.read() for view in views})


def _with_arrays(value: Any, arrays: Mapping[Tensor, np.ndarray]) -> Any:
    if isinstance(value, Tensor):
        return arrays[value]
    if isinstance(value, dict):
        return {key: _with_arrays(each, arrays) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_arrays(each, arrays) for each in value)
    return value


def tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Tensor]]:
    """Every tensor of a decoded value, with the keys that lead to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from tensors(each, (*path, key))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from tensors(each, (*path, number))
