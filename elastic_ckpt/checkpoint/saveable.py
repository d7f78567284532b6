"""Whether a state can be saved in every tier, checked before anything is captured.

A step that RAM accepts and Orbax rejects could never be backed up. So a save rejects
what Orbax rejects: leaves of other types, and trees without a leaf. It also rejects two
leaves that Orbax would write under one name, because one would be lost, and trees that
manifests cannot describe: no later step of the run could be saved either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from elastic_ckpt.checkpoint import orbax_format, tree_structure
from elastic_ckpt.checkpoint.host.trees import leaf_path, structure_text
from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.persistent import (
    evaluations,
    ocdbt,
    orbax_digests,
    persistent_root,
)
from elastic_ckpt.tiers.ram import ram_disk

# Names of Orbax's own, and of files that lie beside the directories of checkpointables.
_RESERVED = frozenset(
    {
        "AUTO",
        "_CHECKPOINT_DELETION",
        "_CHECKPOINT_METADATA",
        "metrics",
        evaluations.FILE,
        orbax_digests.FILE,
        persistent_root.COMMIT_FILE,
        preserved.FILE,
        ram_disk.RESERVED,
    }
)
# Checked trees, by name, structure and types of their leaves, which are usually the
# same at every step of a run.
_KNOWN_TREES = 64
_known: set[tuple[str, str, tuple[type, ...]]] = set()


def check(checkpointables: Mapping[str, Any], components: Mapping[str, Any]) -> None:
    """Raises a CheckpointError that names the part that cannot be saved.

    Args:
      checkpointables: pytrees by name.
      components: other parts by name.
    """
    if not (checkpointables or components):
        raise errors.CheckpointError(
            "no checkpointables were given, so there is"
            " nothing to save; give at least one"
        )
    for name in [*checkpointables, *components]:
        _check_name(name)
    for name, tree in checkpointables.items():
        leaves = jax.tree.leaves(tree)
        texts = [leaf for leaf in leaves if isinstance(leaf, str)]
        key = (name, structure_text(tree), tuple(map(type, leaves)))
        if key not in _known:
            _check_tree(name, tree)
            if len(_known) >= _KNOWN_TREES:
                _known.clear()
            _known.add(key)
        if not all(map(_is_unicode, texts)):
            raise errors.CheckpointError(
                f"a text of {name!r} is not Unicode, and no tier can store it;"
                f" its texts are {texts[:5]}"
            )


def _check_name(name: str) -> None:
    refused = name in ("", ".", "..") or "/" in name or name in _RESERVED
    if refused or manifest_file.is_file_name(name) or not _is_unicode(name):
        raise errors.CheckpointError(
            f"the name {name!r} cannot be used for a checkpointable: it becomes the"
            f" name of a directory, and {sorted(_RESERVED)} are reserved; choose"
            " another name"
        )


def _check_tree(checkpointable: str, tree: Any) -> None:
    entries = orbax_format.entries(tree)
    if not jax.tree.leaves(tree) and not tree:
        raise errors.CheckpointError(
            f"{checkpointable!r} is empty, and Orbax does not save it; leave it out"
        )
    paths: dict[str, str] = {}
    texts: dict[str, str] = {}
    for key_path, leaf in entries:
        path = leaf_path(checkpointable, key_path)
        kind = orbax_format.leaf_kind(leaf, path)
        if kind in orbax_format.EMPTY_KINDS:
            continue
        name = orbax_format.array_name(key_path)
        if not _is_unicode(name):
            raise errors.CheckpointError(
                f"the name of the leaf {path!r} is not Unicode, and no tier can store"
                " it; rename its key"
            )
        prefix = ocdbt.array_prefix(name)
        if prefix in paths:
            raise errors.CheckpointError(
                f"the leaves {paths[prefix]!r} and {path!r} would both be saved as"
                f" {name!r} in Orbax, and one of them lost; rename a key with a '.'"
            )
        paths[prefix] = path
        if kind == "string":
            texts[name] = path
    orbax_format.strings_file(texts)
    try:
        tree_structure.to_json({checkpointable: tree})
    except Exception as error:  # raised by the nodes of a user's library
        raise errors.CheckpointError(
            f"the structure of {checkpointable!r} cannot be saved"
            f" ({type(error).__name__}: {error}); give a tree of dicts, lists and"
            " arrays, such as nnx.state(model)"
        ) from error


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
