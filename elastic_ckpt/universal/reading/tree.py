"""Reads the leaves of a tree from a checkpoint, as this host needs them.

A leaf becomes an array as soon as its group is complete, while others are still read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.universal.formats.checkpoint import Checkpoint
from elastic_ckpt.universal.moves import Matched, TargetTensor
from elastic_ckpt.universal.reading.engine import BUDGET_BYTES, Reader
from elastic_ckpt.universal.reading.sources import VirtualFile


class _Leaf(NamedTuple):
    target: TargetTensor
    wanted: trees.WantedLeaf
    # Whether its values are copied to devices that have their own memory. An array on
    # CPU devices takes over the memory that its values were read into.
    is_staged: bool


def targets(abstract: Any) -> dict[str, TargetTensor]:
    """The leaves of an abstract tree as targets of a layout, by name.

    Args:
      abstract: of `jax.ShapeDtypeStruct`s with shardings, arrays, numbers, and
        functions, which no checkpoint has.

    Raises:
      CheckpointError: if a leaf is of another kind.
    """
    return {leaf.target.name: leaf.target for leaf in _leaves(abstract)}


def load(
    checkpoint: Checkpoint,
    matched: Matched,
    abstract: Any,
    *,
    budget_bytes: int = BUDGET_BYTES,
    files: Mapping[str, VirtualFile] | None = None,
) -> Any:
    """Reads the leaves that a layout makes of a checkpoint.

    In a world of several hosts each calls it, and reads what its devices need, once.

    Args:
      checkpoint: that is open.
      matched: the layout, matched with it and with `targets(abstract)`.
      abstract: see `targets`.
      budget_bytes: the most memory of requests in flight, and the most bytes of leaves
        on the way to devices with their own memory; a single request or leaf may have
        more.
      files: virtual files that the checkpoint's tensors lie in.

    Returns:
      A tree like `abstract`, of arrays in the shardings and dtypes of its leaves;
      functions stay.

    Raises:
      CheckpointError: if an element of a leaf is filled by no source or by two, a file
        cannot be read, or sources that should be equal differ; FormatError if a file
        ends too early or has another checksum.
    """
    leaves = {leaf.target: leaf for leaf in _leaves(abstract)}
    made = {
        path: leaf
        for path, leaf in trees.leaves({"": abstract}).items()
        if _is_function(leaf)
    }
    reader = Reader(
        checkpoint,
        matched,
        [target.name for target in leaves],
        budget_bytes=budget_bytes,
        is_kept=not any(leaf.is_staged for leaf in leaves.values()),
        files=files,
    )
    units = [(target, leaf.wanted.boxes) for target, leaf in leaves.items()]
    # An error that is raised here would keep the iterator, and so its threads.
    with contextlib.closing(reader.read(units)) as groups:
        for buffers in groups:
            arrays = iter([buffer.values for buffer in buffers])
            for target in dict.fromkeys(buffer.target for buffer in buffers):
                wanted, is_staged = leaves[target][1:]
                # Nothing but the leaf refers to the memory from here on.
                made[wanted.path] = wanted.make([next(arrays) for _ in wanted.boxes])
                if is_staged:
                    # The memory is that of the budget until the devices have it.
                    jax.block_until_ready(made[wanted.path])
    for leaf in leaves.values():
        if not leaf.wanted.boxes:
            made[leaf.wanted.path] = leaf.wanted.make([])
    reader.checks.finish()
    return trees.rebuilt(abstract, "", made)


def _leaves(abstract: Any) -> Iterator[_Leaf]:
    named = {
        "": jax.tree.map(lambda leaf: None if _is_function(leaf) else leaf, abstract)
    }
    described = zip(
        trees.asked(named),
        trees.wanted(named),
        trees.leaves(named).values(),
        strict=True,
    )
    for asked, wanted, leaf in described:
        dtype = np.asarray(leaf).dtype if asked.dtype is None else asked.dtype
        devices = asked.sharding.device_set if asked.sharding is not None else ()
        target = TargetTensor(
            name=wanted.path.removeprefix("/"),
            dtype=np.dtype(dtype),
            shape=wanted.shape,
        )
        yield _Leaf(target, wanted, any(each.platform != "cpu" for each in devices))


def _is_function(leaf: Any) -> bool:
    # Equinox has those of activations among the leaves of a module.
    return callable(leaf) and not (isinstance(leaf, type) or hasattr(leaf, "shape"))
