"""Reads the leaves of a tree from a checkpoint, as this host needs them.

A leaf becomes an array as soon as its boxes are complete, while others are still read.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats.checkpoint import Checkpoint
from elastic_ckpt.universal.moves import Fill, Move, TargetTensor
from elastic_ckpt.universal.plan.load_plan import LoadPlan
from elastic_ckpt.universal.reading.byte_source import ByteSource
from elastic_ckpt.universal.reading.planned_reads import PlannedReads
from elastic_ckpt.universal.reading.transfer import Transfer

BUDGET_BYTES = 2**28


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TargetLeaf:
    """A leaf of the tree that is restored.

    Attributes:
      tensor: its name, without that of the tree, and its dtype and shape.
      leaf: its boxes of this host, and how it is made of them.
      is_staged: whether its values are copied to devices that have their own memory.
    """

    tensor: TargetTensor
    leaf: trees.WantedLeaf
    is_staged: bool


def is_staged(platforms: Iterable[str]) -> bool:
    """Whether values are copied to devices that have their own memory.

    An array on CPU devices takes over the memory that its values were read into.

    Args:
      platforms: of the devices.
    """
    return any(platform != "cpu" for platform in platforms)


def target_leaves(abstract: Any) -> list[TargetLeaf]:
    """The leaves of an abstract tree, in its order.

    Args:
      abstract: of `jax.ShapeDtypeStruct`s with shardings, arrays, numbers, and
        functions, which no checkpoint has.

    Raises:
      CheckpointError: if a leaf is of another kind.
    """
    named = {
        "": jax.tree.map(lambda leaf: None if _is_function(leaf) else leaf, abstract)
    }
    leaves = zip(
        trees.asked(named),
        trees.wanted(named),
        trees.leaves(named).values(),
        strict=True,
    )
    return [
        TargetLeaf(
            tensor=TargetTensor(
                name=leaf.path.removeprefix("/"),
                dtype=np.dtype(
                    np.asarray(value).dtype if asked.dtype is None else asked.dtype
                ),
                shape=leaf.shape,
            ),
            leaf=leaf,
            is_staged=asked.sharding is not None
            and is_staged(each.platform for each in asked.sharding.device_set),
        )
        for asked, leaf, value in leaves
    ]


def rebuilt(abstract: Any, made: Mapping[str, Any]) -> Any:
    """An abstract tree with the leaves that were read; functions stay.

    Args:
      abstract: see `target_leaves`.
      made: what `read_leaves` returned.
    """
    leaves = trees.leaves({"": abstract})
    functions = {path: leaf for path, leaf in leaves.items() if _is_function(leaf)}
    return trees.rebuilt(abstract, "", {**functions, **made})


def read_leaves(
    checkpoint: Checkpoint,
    moves: Sequence[Move],
    fills: Sequence[Fill],
    leaves: Sequence[TargetLeaf],
    *,
    budget_bytes: int = BUDGET_BYTES,
    source: ByteSource | None = None,
) -> Mapping[str, Any]:
    """Reads the leaves that moves make of a checkpoint.

    In a world of several hosts each calls it, and reads what its devices need, once.

    Args:
      checkpoint: that is open.
      moves: from its tensors into the leaves; those into others are left out.
      fills: parts of leaves that no tensor has.
      leaves: see `target_leaves`.
      budget_bytes: the most bytes of requests in flight, and the most bytes of leaves
        that are complete in part on the way to devices with their own memory; a single
        request or leaf may have more.
      source: see `PlannedReads.of_boxes`.

    Returns:
      By path, the arrays in the shardings and dtypes of the leaves.

    Raises:
      CheckpointError: if an element of a leaf is filled by no source or by two, a file
        cannot be read, or sources that should be equal differ; FormatError if a file
        ends too early or has another checksum.
    """
    needed = {each.tensor: each.leaf.boxes for each in leaves}
    planned = PlannedReads.of_boxes(checkpoint, moves, fills, needed, source=source)
    checks = planned.checks(checkpoint)
    leaf_of = [leaf for leaf in leaves for _ in leaf.leaf.boxes]
    transfer = Transfer(
        planned.plan,
        planned.sources().__getitem__,
        budget_bytes=budget_bytes,
        is_staged=lambda number: leaf_of[number].is_staged,
        note=None if checks is None else checks.note,
    )
    made = _made(leaves, planned.plan, transfer)
    if checks is not None:
        checks.finish()
    return made


def _is_function(leaf: Any) -> bool:
    # Equinox has those of activations among the leaves of a module.
    return callable(leaf) and not (isinstance(leaf, type) or hasattr(leaf, "shape"))


def _made(
    leaves: Sequence[TargetLeaf], plan: LoadPlan, transfer: Transfer
) -> Mapping[str, Any]:
    leaf_of = [leaf for leaf in leaves for _ in leaf.leaf.boxes]
    parts: dict[str, dict[Box, np.ndarray]] = collections.defaultdict(dict)
    numbers: dict[str, list[int]] = collections.defaultdict(list)
    made = {
        leaf.leaf.path: leaf.leaf.make([]) for leaf in leaves if not leaf.leaf.boxes
    }
    # An error that is raised here would keep the generator, and so its threads.
    with contextlib.closing(transfer.buffers()) as buffers:
        for number, elements in buffers:
            target = leaf_of[number]
            path = target.leaf.path
            parts[path][plan.buffers[number].box] = elements
            del elements
            numbers[path].append(number)
            if len(numbers[path]) < len(target.leaf.boxes):
                continue
            of_box = parts.pop(path)
            made[path] = target.leaf.make([of_box[box] for box in target.leaf.boxes])
            if target.is_staged:
                # Its bytes are in flight until the devices have them.
                jax.block_until_ready(made[path])
            del of_box
            for complete in numbers.pop(path):
                transfer.free(complete)
    return made
