"""Opens checkpoints from Orbax v0 and v1, and our steps in persistent storage.

A tensor's name is the path of its leaf, such as `params/dense/kernel`; if a checkpoint
has more than one pytree, the tensor's name begins with the pytree's name, as in
`state/params/dense/kernel`. Numbers are also tensors; strings are values. TensorStore
reads tensors by their specs and compares their checksums: our steps have one for each
chunk; stock Orbax's have none.

Orbax stores arrays as zarr, version 2 or 3, either each in a directory or all together
in an OCDBT store. This module reads only the arrays' metadata, with many concurrent
reads, because opening an array in TensorStore takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps.manifest import escaped
from elastic_ckpt.tiers.persistent.persistent_root import COMMIT_FILE
from elastic_ckpt.universal.formats import files
from elastic_ckpt.universal.formats.checkpoint import (
    Checkpoint,
    StoredTensor,
    checked_shape,
    flatten,
)
from elastic_ckpt.universal.formats.files import FormatError

_TREE, _STRINGS, _STEP = "_METADATA", "_strings.json", "_CHECKPOINT_METADATA"
_UNCOMMITTED = ".orbax-checkpoint-tmp"
# Types of values without an array: strings, and nodes without children.
_WITHOUT_ARRAY = frozenset(("string", "None", "Dict", "List", "Tuple"))


def is_format(names: Collection[str]) -> bool:
    """Whether a directory with these file names is an Orbax step or pytree."""
    return _TREE in names or _STEP in names


def open_checkpoint(path: epath.PathLike) -> Checkpoint:
    """Opens a step, or the directory of one of its pytrees.

    Raises:
      FormatError: if the step was not committed or does not have a pytree, or if the
        metadata is malformed or does not match the arrays.
    """
    directory = epath.Path(path)
    held = {each.name: each for each in sorted(directory.iterdir())}
    if _UNCOMMITTED in directory.name or (
        not storage.is_local(directory) and _STEP in held and COMMIT_FILE not in held
    ):
        raise FormatError(f"{path} was not committed; use a different step")
    trees = {"": directory}
    if _TREE not in held:
        trees = {name: each for name, each in held.items() if (each / _TREE).exists()}
    if not trees:
        raise FormatError(f"{path} has no pytree: none of its directories has {_TREE}")
    values: dict[str, Any] = {}
    if _STEP in held:
        custom = files.read_json(directory / _STEP).get("custom_metadata")
        values |= flatten({"custom_metadata": custom} if custom else {})
    tensors = []
    for name, tree in trees.items():
        prefix = f"{escaped(name)}/" if len(trees) > 1 else ""
        tensors += _tensors(tree, prefix)
        if (tree / _STRINGS).exists():
            texts = flatten(files.read_json(tree / _STRINGS))
            values |= {prefix + key: text for key, text in texts.items()}
    return Checkpoint(format="Orbax", tensors=tensors, values=values)


def _tensors(directory: epath.Path, prefix: str) -> Iterator[StoredTensor]:
    # TensorStore is slow to import, and other formats do not need it.
    import tensorstore as ts

    from elastic_ckpt.tiers.persistent import ocdbt

    fields = files.read_json(directory / _TREE)
    keys, is_zarr3 = _leaves(fields, directory), bool(fields.get("use_zarr3"))
    base: Any = ocdbt.base_spec(directory)
    is_ocdbt = fields.get("use_ocdbt")
    if is_ocdbt is None:
        is_ocdbt = (directory / "manifest.ocdbt").exists()
    if is_ocdbt:
        base = {**ocdbt.store_spec(directory), "path": ""}
        # The reader's context limits the total memory of all caches.
        del base["cache_pool"]
    elif not all(part.strip(".") for name in keys for part in name.split("/")):
        # An OCDBT store accepts any name, but a path must not leave the directory.
        raise FormatError(f"{directory} lists arrays outside itself: {list(keys)}")

    def at(path: str) -> Any:
        is_url = isinstance(base, str)
        return base + path if is_url else {**base, "path": base["path"] + path}

    prefixes = {name: ocdbt.array_prefix(name) for name in keys}
    file = "zarr.json" if is_zarr3 else ".zarray"
    try:
        store = ts.KvStore.open(at("")).result()
        reads = {name: store.read(each + file) for name, each in prefixes.items()}
        contents = {name: read.result() for name, read in reads.items()}
    # TensorStore also raises ValueErrors.
    except (OSError, ValueError) as error:
        errors.check_open_files(error)
        reason = str(error).partition("\n")[0][:300]
        raise FormatError(
            f"{directory} cannot be read ({reason}); restore it from a good copy"
        ) from error
    for name, content in contents.items():
        place = f"{directory}: {name}"
        if content.state != "value":
            raise FormatError(f"{place} is listed, but is not in the store")
        stated = files.parse_json(bytes(content.value), place)
        shape = stated.get("shape")
        yield StoredTensor(
            name=prefix + "/".join(map(escaped, keys[name])),
            dtype=_dtype(stated.get("data_type" if is_zarr3 else "dtype"), place),
            shape=checked_shape(shape if isinstance(shape, list) else [shape], place),
            spec={
                "driver": "zarr3" if is_zarr3 else "zarr",
                "kvstore": at(prefixes[name]),
                # If every chunk should have been written, a missing one is an error.
                "fill_missing_data_reads": not fields.get(
                    "store_array_data_equal_to_fill_value"
                ),
            },
        )


def _leaves(fields: Mapping[str, Any], directory: epath.Path) -> dict[str, list[str]]:
    # The keys that lead to each array, by array name.
    names: dict[str, list[str]] = {}
    try:
        for leaf in fields["tree_metadata"].values():
            value = leaf["value_metadata"]
            if not value.get("skip_deserialize") and (
                value["value_type"] not in _WITHOUT_ARRAY
            ):
                keys = [key["key"] for key in leaf["key_metadata"]]
                name = ".".join(keys)
                if name in names:
                    raise ValueError(f"{name!r} is listed twice")
                names[name] = keys
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{directory / _TREE} does not list arrays as Orbax does ({error!r})"
        ) from None
    return names


def _dtype(name: Any, place: str) -> np.dtype:
    try:
        dtype = np.dtype(str(name)).newbyteorder("=")
    except (TypeError, ValueError, SyntaxError):
        dtype = np.dtype(object)
    # Dtypes of other kinds must come from ml_dtypes.
    if dtype.kind not in "biufc" and dtype.isbuiltin != 2:
        raise FormatError(f"{place} has the unsupported type {name!r:.40}")
    return dtype
