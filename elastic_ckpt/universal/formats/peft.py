"""PEFT adapters, which are opened together with the model that they adapt.

`adapter_config.json` specifies this model, the base: a directory, or the ID of a model
in the hub's local cache. The checkpoint has the tensors of both, with the names in
their files. Numbers and strings in `adapter_config.json` are values, such as
`adapter/r`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Sequence

from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.universal.formats import files
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, Checksum, flatten
from elastic_ckpt.universal.formats.files import FormatError

FORMAT = "PEFT adapter"
CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_BASE = "base_model_name_or_path"
_REMEDY = (
    f"set {_BASE} there to the base model's path, absolute or relative to the"
    f" adapter's directory; to open only the adapter, pass the path of {_WEIGHTS[0]}"
)


def is_format(names: Collection[str]) -> bool:
    """Whether a directory with these file names has an adapter."""
    return CONFIG in names


def weights(path: epath.PathLike) -> epath.Path:
    """The file with an adapter's tensors.

    Raises:
      FormatError: if the file is missing.
    """
    for name in _WEIGHTS:
        if (file := epath.Path(path) / name).exists():
            return file
    raise FormatError(f"{path} has {CONFIG}, but neither {' nor '.join(_WEIGHTS)}")


def base(path: epath.PathLike) -> epath.Path:
    """The directory or file of an adapter's base model.

    Raises:
      FormatError: if the adapter does not specify a base, or the base is not on this
        machine or is itself an adapter.
    """
    found = storage.absolute(path)
    config = found / CONFIG
    fields = files.read_json(config)
    named, revision = fields.get(_BASE), fields.get("revision")
    if not isinstance(named, str) or not named or not named.isprintable():
        raise FormatError(f"{config} has no {_BASE}; {_REMEDY}")
    for part in pathlib.PurePosixPath(named[: files.MOST_NAME_BYTES]).parts:
        found = found.parent if part == ".." else found / part
    if named.startswith(files.SCHEME) or not found.exists():
        name = named.removeprefix(files.SCHEME)
        if isinstance(revision, str) and "@" not in name:
            name = f"{name}@{revision}"
        try:
            found = epath.Path(files.resolved(files.SCHEME + name))
        except FormatError as error:
            raise FormatError(
                f"{config} has the {_BASE} {named!r}, which is not a directory on this"
                f" machine: {error}; or {_REMEDY}"
            ) from None
    if (found / CONFIG).exists():
        raise FormatError(
            f"{config} has the {_BASE} {named!r}, which is itself an adapter; convert"
            f" that adapter first, then {_REMEDY}"
        )
    return found


def joined(path: epath.PathLike, adapter: Checkpoint, base: Checkpoint) -> Checkpoint:
    """Joins an adapter's checkpoint and its base's; the adapter's directory is `path`.

    Raises:
      FormatError: if both checkpoints have a tensor with the same name.
    """
    values = flatten({"adapter": files.read_json(epath.Path(path) / CONFIG)})
    of_base = {tensor.name for tensor in base.tensors}
    for tensor in adapter.tensors:
        if tensor.name in of_base:
            raise FormatError(f"{path} and its base both have a tensor {tensor.name}")
    held = {each.file for tensor in adapter.tensors for each in tensor.fragments}

    def checksums(file: str) -> Sequence[Checksum]:
        return (adapter if file in held else base).checksums(file)

    return Checkpoint(
        format=f"{FORMAT} of {base.format}",
        tensors=(*base.tensors, *adapter.tensors),
        axes=base.axes,
        values={**adapter.values, **base.values, **values},
        checksums=checksums,
    )
