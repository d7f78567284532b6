"""Opens checkpoints of Orbax v0 and v1, and ours in persistent storage.

A tensor has the path of its leaf, `params/dense/kernel`; if a checkpoint has several
pytrees, it begins with the name of one, `state/params/dense/kernel`. Numbers are
tensors too, and texts are values. TensorStore reads tensors by their specs and compares
the checksums that they have: ours have one for each chunk, Orbax's have none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.steps.manifest import escaped
from elastic_ckpt.tiers.persistent.persistent_root import COMMIT_FILE
from elastic_ckpt.universal.formats import source_files
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.stored import StoredTensor

_TREE, _STRINGS, _STEP = "_METADATA", "_strings.json", "_CHECKPOINT_METADATA"
_UNCOMMITTED = ".orbax-checkpoint-tmp"
# Values without an array: texts, and nodes without children.
_WITHOUT_ARRAY = frozenset(("string", "None", "Dict", "List", "Tuple"))


def is_format(names: Collection[str]) -> bool:
    """Whether files of these names, in one directory, are such a checkpoint."""
    return _TREE in names or _STEP in names


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens a step, or the directory of a pytree in one.

    Raises:
      FormatError: if it was not committed, has no pytree, or its metadata are
        malformed or do not fit its arrays.
    """
    directory = epath.Path(path)
    names = {each.name for each in directory.iterdir()}
    if _UNCOMMITTED in directory.name or (
        not storage.is_local(directory) and _STEP in names and COMMIT_FILE not in names
    ):
        raise FormatError(f"{path} was not committed; use another step")
    if _TREE in names:
        trees = {"": directory}
    else:
        trees = {
            each.name: each
            for each in sorted(directory.iterdir())
            if (each / _TREE).exists()
        }
    if not trees:
        raise FormatError(f"{path} has no pytree: no directory in it has {_TREE}")
    tensors, values = [], dict(_custom_metadata(directory))
    for name, tree in trees.items():
        prefix = f"{escaped(name)}/" if len(trees) > 1 else ""
        tensors += list(_tensors(tree, prefix))
        values |= _strings(tree, prefix)
    return OpenedCheckpoint(format="Orbax", tensors=tensors, values=values)


def _tensors(directory: epath.Path, prefix: str) -> Iterator[StoredTensor]:
    # TensorStore takes long to import, and other formats do not need it.
    from elastic_ckpt.universal.formats import orbax_arrays

    fields = source_files.read_json(directory / _TREE)
    try:
        keys = dict(_leaves(fields))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{directory / _TREE} does not list arrays as Orbax does ({error!r})"
        ) from None
    store = orbax_arrays.open_store(directory, fields)
    for name, dtype, shape in store.read(list(keys)):
        yield StoredTensor(
            name=prefix + "/".join(map(escaped, keys[name])),
            dtype=dtype,
            shape=shape,
            spec=store.spec(name),
        )


def _leaves(fields: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    # The name of each array, and the keys that lead to it.
    names = set()
    for leaf in fields["tree_metadata"].values():
        value = leaf["value_metadata"]
        if value.get("skip_deserialize") or value["value_type"] in _WITHOUT_ARRAY:
            continue
        keys = [key["key"] for key in leaf["key_metadata"]]
        name = ".".join(keys)
        if name in names:
            raise ValueError(f"{name} is listed twice")
        names.add(name)
        yield name, keys


def _strings(directory: epath.Path, prefix: str) -> dict[str, str]:
    path = directory / _STRINGS
    if not path.exists():
        return {}
    texts: dict[str, str] = {}
    pending: list[tuple[str, Any]] = [(prefix, source_files.read_json(path))]
    while pending:
        at, node = pending.pop()
        if isinstance(node, dict):
            for key, child in node.items():
                slash = "/" if isinstance(child, dict) else ""
                pending.append((f"{at}{escaped(key)}{slash}", child))
        elif isinstance(node, str):
            texts[at] = node
    return texts


def _custom_metadata(directory: epath.Path) -> Iterator[tuple[str, Any]]:
    path = directory / _STEP
    fields = (
        source_files.read_json(path).get("custom_metadata") if path.exists() else None
    )
    if isinstance(fields, dict):
        for key, value in fields.items():
            yield f"custom_metadata/{escaped(key)}", value
