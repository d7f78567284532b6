"""An adapter of PEFT, which is opened together with the model that it adapts.

`adapter_config.json` names the model, its base: a directory, or the id of a model in
the local cache of the hub. The tensors are those of both, with the names that they have
in their files; numbers and texts of `adapter_config.json` are values, `adapter/r`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Sequence

from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.universal.formats import (
    hugging_face,
    plain_values,
    source_files,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.stored import Checkpoint, Checksum

FORMAT = "PEFT adapter"
CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_BASE = "base_model_name_or_path"


def is_format(names: Collection[str]) -> bool:
    """Whether files of these names, in one directory, are an adapter."""
    return CONFIG in names


def weights(path: epath.PathLike) -> epath.Path:
    """The file of an adapter's tensors.

    Raises:
      FormatError: if there is none.
    """
    for name in _WEIGHTS:
        file = epath.Path(path) / name
        if file.exists():
            return file
    raise FormatError(f"{path} has {CONFIG}, and neither {' nor '.join(_WEIGHTS)}")


def base(path: epath.PathLike) -> epath.Path:
    """The directory or file of the model that an adapter adapts.

    Raises:
      FormatError: if it is not named, not on this machine, or itself an adapter.
    """
    found = storage.absolute(path)
    config = found / CONFIG
    fields = source_files.read_json(config)
    named, revision = fields.get(_BASE), fields.get("revision")
    if not isinstance(named, str) or not named:
        raise FormatError(f"{config} has no {_BASE}; {_REMEDY}")
    for each in (named, revision):
        if isinstance(each, str) and not _is_printable(each):
            raise FormatError(f"{config} names {each[:60]!a}, which is no {_BASE}")
    for part in pathlib.PurePosixPath(named).parts:
        found = found.parent if part == ".." else found / part
    if hugging_face.is_id(named) or not found.exists():
        found = _cached(config, named, revision)
    if (found / CONFIG).exists():
        raise FormatError(
            f"{config} has the {_BASE} {named!r}, which is an adapter, too; convert it"
            f" first, and {_REMEDY}"
        )
    return found


_REMEDY = (
    f"set {_BASE} there to the path of the model, absolute or from that directory on;"
    f" for the adapter alone, give the path of {_WEIGHTS[0]}"
)


def _is_printable(name: str) -> bool:
    return len(name) <= source_files.MOST_NAME_BYTES and name.isprintable()


def _cached(config: epath.Path, named: str, revision: object) -> epath.Path:
    name = named.removeprefix(hugging_face.SCHEME)
    if isinstance(revision, str) and "@" not in name:
        name = f"{name}@{revision}"
    try:
        return epath.Path(hugging_face.snapshot(hugging_face.SCHEME + name))
    except FormatError as error:
        raise FormatError(
            f"{config} has the {_BASE} {named!r}, which is no directory here: {error};"
            f" or {_REMEDY}"
        ) from None


def joined(
    path: epath.PathLike, adapter: Checkpoint, base: Checkpoint
) -> OpenedCheckpoint:
    """The checkpoint of an adapter and its base.

    Args:
      path: the directory of the adapter.
      adapter: its tensors.
      base: those of its base.

    Raises:
      FormatError: if both have a tensor of the same name.
    """
    config = epath.Path(path) / CONFIG
    values = plain_values.flatten({"adapter": source_files.read_json(config)})
    of_base = {tensor.name for tensor in base.tensors}
    for tensor in adapter.tensors:
        if tensor.name in of_base:
            raise FormatError(f"{path} has {tensor.name}, and so has its base")
    files = {each.file for tensor in adapter.tensors for each in tensor.fragments}

    def checksums(file: str) -> Sequence[Checksum]:
        return (adapter if file in files else base).checksums(file)

    return OpenedCheckpoint(
        format=f"{FORMAT} of {base.format}",
        tensors=(*base.tensors, *adapter.tensors),
        axes=base.axes,
        values={**adapter.values, **base.values, **values},
        checksums=checksums,
    )
