"""Loads trees through layouts, from other frameworks' checkpoints and from steps.

Nothing is written to disk. A leaf becomes an array as soon as its group is complete,
while later groups are still being read.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.core import allgather, calls
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.universal import opening, shipped
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, StoredTensor
from elastic_ckpt.universal.moves import Matched, TargetTensor
from elastic_ckpt.universal.reading import sources
from elastic_ckpt.universal.reading.engine import BUDGET_BYTES, Reader
from elastic_ckpt.universal.reading.sources import VirtualFile
from elastic_ckpt.universal.rules import matching, names
from elastic_ckpt.universal.rules.layout import Layout

# Chooses the layout for a checkpoint and its targets.
_Rules = Callable[[Checkpoint, Mapping[str, TargetTensor]], Layout]


def load(
    path: epath.PathLike,
    abstract_state: Any,
    *,
    layout: Layout | str | os.PathLike[str] | None = None,
    budget_bytes: int = BUDGET_BYTES,
) -> Any:
    """Loads another framework's checkpoint into a tree of arrays.

        path = "gs://bucket/llama"
        state = ec.universal.load(path, abstract_state, layout="llama.yml")

    Every process must call this function; each process reads only the bytes that its
    own devices need.

    Args:
      path: the checkpoint's directory or file, local or in a bucket.
      abstract_state: a pytree of numbers, arrays, or `jax.ShapeDtypeStruct`s with
        shardings, such as a dict or a Flax or Equinox state. The keys to a leaf, joined
        by "/", are the leaf's name in the layout; the `value` key of Flax's `Param` and
        `Partitioned` may be omitted.
      layout: a description of how the checkpoint's tensors (`from`) relate to these
        leaves (`to`): a `Layout`, a YAML file path, or the name of a layout that ships
        with the package. None for DeepSpeed checkpoints, which describe their own
        layout, and for checkpoints whose tensors have the same names as the leaves.
        With None, an adapter is merged into its base model.
      budget_bytes: the maximum size of the requests in flight and, separately, of the
        incomplete leaves.

    Returns:
      A pytree like `abstract_state`, with loaded arrays in the same shardings and
      dtypes. Functions are unchanged.

    Raises:
      FormatError: if the checkpoint is damaged, or not in a supported format.
      LayoutError: if the layout does not match the checkpoint or the tree.
      CheckpointError: if a file cannot be read, or copies of a tensor that should be
        identical differ.
      RunError: if loading fails on another host. The message contains that host and its
        error.
    """

    def rules(checkpoint: Checkpoint, targets: Mapping[str, TargetTensor]) -> Layout:
        if layout is None:
            return shipped.default_layout(checkpoint, targets)
        return shipped.resolve(layout)

    return _loaded(path, abstract_state, rules, budget_bytes)


def load_leaves(path: epath.PathLike, abstract_state: Any) -> Any:
    """Loads each leaf from the tensor of the same name and ignores all other tensors.

    For the arguments, see `load`.

    Raises:
      OtherModelError: if a tensor is missing or has a different shape.
      FormatError, CheckpointError, RunError: as `load`.
    """

    def rules(checkpoint: Checkpoint, targets: Mapping[str, TargetTensor]) -> Layout:
        return layout_of_leaves(str(path), checkpoint.tensors, targets)

    return _loaded(path, abstract_state, rules, BUDGET_BYTES)


def _loaded(
    path: epath.PathLike, abstract_state: Any, rules: _Rules, budget_bytes: int
) -> Any:
    # If one host fails, all fail, so that none hangs in the collectives that follow.
    hosts = allgather.shared()
    everywhere = functools.partial(hosts.agreed, timeout_secs=calls.LONG_SECS)
    found: list[tuple[Checkpoint, Matched]] = []
    made: list[Any] = []
    everywhere(
        "load_opens", lambda: found.append(_matched(path, abstract_state, rules))
    )
    everywhere(
        "load_reads",
        lambda: made.append(
            read_tree(
                *found[0],
                abstract_state,
                budget_bytes=budget_bytes,
                host=(hosts.host, hosts.num_hosts),
            )
        ),
    )
    return made[0]


def _matched(
    path: epath.PathLike, abstract_state: Any, rules: _Rules
) -> tuple[Checkpoint, Matched]:
    checkpoint = opening.open_checkpoint(path)
    targets = targets_of(abstract_state)
    layout = rules(checkpoint, targets).with_values(checkpoint.values)
    matched = matching.moves(layout, checkpoint.tensors, checkpoint.axes, targets)
    return checkpoint, matched


def layout_of_leaves(
    path: str, stored: Sequence[StoredTensor], targets: Mapping[str, TargetTensor]
) -> Layout:
    """The layout that fills each target from the tensor of the same name.

    The layout drops all other tensors. `path` is used in messages.

    Raises:
      OtherModelError: if a tensor is missing or has a different shape.
    """
    shapes = {each.name: str(list(each.shape)) for each in stored}
    wanted = {name: str(list(each.shape)) for name, each in targets.items()}
    present = {name: shapes[name] for name in wanted.keys() & shapes.keys()}
    trees.check_same_model(path, present, wanted)
    drop = [names.glob_of(name) for name in shapes.keys() - targets.keys()]
    return Layout(rules=(shipped.SAME_NAMES,), drop=tuple(drop), place=path)


def relayout(
    contents: Contents | None,
    name: str,
    abstract: Any,
    layout: Layout | str | os.PathLike[str],
) -> Callable[[VerifiedReader | epath.Path], Any]:
    """Matches a layout with a step's tree; see `checkpoint.restore.Relayout`.

    Raises:
      LayoutError: if the layout does not match the step or the tree.
    """
    matched = (
        matching.moves(
            # Steps have no values.
            shipped.resolve(layout).with_values({}),
            sources.tensors_of(contents, name),
            {},
            targets_of(abstract),
        )
        if contents is not None
        else None
    )

    def read(saved: VerifiedReader | epath.Path) -> Any:
        if not isinstance(saved, VerifiedReader):
            return load(saved, abstract, layout=layout)
        assert matched is not None
        stored, files = sources.saved_boxes(saved, name)
        checkpoint = Checkpoint(format="elastic_ckpt", tensors=stored)
        return read_tree(checkpoint, matched, abstract, files=files)

    return read


class _Leaf(NamedTuple):
    target: TargetTensor
    wanted: trees.WantedLeaf
    # Whether the values are copied to devices with their own memory. An array on CPU
    # devices reuses the memory that its values were read into.
    is_staged: bool


def targets_of(abstract: Any) -> dict[str, TargetTensor]:
    """Describes an abstract tree's leaves as layout targets, by name.

    Args:
      abstract: a tree of numbers, arrays, `jax.ShapeDtypeStruct`s with shardings, and
        functions, which are skipped.

    Raises:
      CheckpointError: if a leaf is anything else.
    """
    return {leaf.target.name: leaf.target for leaf in _leaves(abstract)}


def read_tree(
    checkpoint: Checkpoint,
    matched: Matched,
    abstract: Any,
    *,
    budget_bytes: int = BUDGET_BYTES,
    files: Mapping[str, VirtualFile] | None = None,
    host: tuple[int, int] = (0, 1),
) -> Any:
    """Reads a tree's leaves from a checkpoint through a layout.

    Every host of a world must call this function. Each host reads the bytes that its
    devices need once.

    Args:
      checkpoint: the open checkpoint.
      matched: a layout matched with `checkpoint` and `targets_of(abstract)`.
      abstract: see `targets_of`.
      budget_bytes: the maximum size of the requests in flight and, separately, of the
        leaves that are being copied to devices with their own memory. A single request
        or leaf may exceed it.
      files: the virtual files of the checkpoint's tensors, by file name.
      host: this host's index and the number of hosts. The hosts share the work of
        comparing checksums.

    Returns:
      A tree like `abstract`, with loaded arrays in the shardings and dtypes of its
      leaves. Functions are unchanged.

    Raises:
      CheckpointError: if no source or two sources fill an element of a leaf, a file
        cannot be read, or sources that should be identical differ.
      FormatError: if a file is truncated or its checksum does not match.
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
        host=host,
    )
    units = [(target, leaf.wanted.boxes) for target, leaf in leaves.items()]
    # An error's traceback would keep the iterator and its threads alive.
    with contextlib.closing(reader.read(units)) as groups:
        for buffers in groups:
            arrays = iter([buffer.values for buffer in buffers])
            for target in dict.fromkeys(buffer.target for buffer in buffers):
                wanted, is_staged = leaves[target][1:]
                # From here on, only the leaf refers to the memory.
                made[wanted.path] = wanted.make([next(arrays) for _ in wanted.boxes])
                if is_staged:
                    # Until the devices have the values, the budget includes them.
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
    # Equinox has activation functions among a module's leaves.
    return callable(leaf) and not (isinstance(leaf, type) or hasattr(leaf, "shape"))
