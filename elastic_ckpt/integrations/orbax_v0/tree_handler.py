"""A pytree as an item of v0's `CheckpointManager`, with digests of all values.

A save copies what this host's devices hold (`host.capture`); the rest happens in the
background. Each box is written by one host. On disk the item is what Orbax's own
handler would write, with CRC-32C behind the values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent import futures
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from elastic_ckpt.checkpoint import (
    asked_trees,
    foreign_steps,
    orbax_format,
    tree_structure,
)
from elastic_ckpt.checkpoint.step_description import Chunks, StepDescription
from elastic_ckpt.core import boxes, host_memory, storage
from elastic_ckpt.host import (
    backup,
    capture,
    captured_step,
    recovery,
    trees,
    verified_read,
    views,
)
from elastic_ckpt.integrations.orbax_v0 import item_handler, step_manifests
from elastic_ckpt.manifests import layout, uploads
from elastic_ckpt.manifests.holdings import Holdings, Offer
from elastic_ckpt.manifests.manifest import Contents, Fragment
from elastic_ckpt.tiers.captured import Captured
from elastic_ckpt.tiers.persistent import ocdbt, orbax_digests

# As in a backup: a batch in memory for each thread, twice.
_THREADS = 4
_BATCH_ITEMS = 2048


class TreeHandler(item_handler.ItemHandler):
    """Saves and restores pytrees of arrays, numbers, texts and random keys.

    Args:
      timeout_secs: see `ItemHandler`.
    """

    def __init__(self, *, timeout_secs: float = 600.0) -> None:
        super().__init__(timeout_secs=timeout_secs)
        self._pool = host_memory.Pool()
        self._views = views.Views()

    def begin(
        self, name: str, directory: epath.Path, item: Any
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """See `ItemHandler`.

        Raises:
          CheckpointError: if a leaf cannot be saved; it names the leaf.
        """
        description = StepDescription.from_trees(
            {name: item}, {}, metrics=None, custom_metadata=None
        )
        values = trees.arrays({name: item})
        owners = captured_step.Owners(
            values, number=self._messages.host, num_hosts=self._messages.num_hosts
        )
        captured = capture.capture(values, self._pool, self._views)

        def write() -> None:
            try:
                _write(directory, captured, description, owners.is_own)
            finally:
                captured.release()

        return write, lambda: _finish(name, directory, description)

    def restore(self, directory: epath.Path, args: TreeRestore | None = None) -> Any:
        """Restores the tree, verified, under any sharding and number of hosts.

        Logs a warning if plain Orbax wrote the item: such values cannot be verified.

        Raises:
          CheckpointError: if the step is of another model, or a value is not what was
            saved.
        """
        args = args or TreeRestore()
        return self.agreed(f"restore/{directory.name}", lambda: _read(directory, args))

    def metadata(self, directory: epath.Path) -> Any:
        """The tree with the metadata of its leaves, as Orbax's own handler reads it."""
        return ocp.PyTreeCheckpointHandler().metadata(directory)

    @classmethod
    def typestr(cls) -> str:
        """The name on disk, by which Orbax v1 finds its own handler."""
        return orbax_format.handler_name("PyTreeHandler")


@ocp.args.register_with_handler(TreeHandler, for_save=True)
@dataclasses.dataclass
class TreeSave(ocp.args.CheckpointArgs):
    """Saves a pytree.

    Attributes:
      item: the tree; its arrays may be donated once `CheckpointManager.save` returned.
    """

    item: Any


@ocp.args.register_with_handler(TreeHandler, for_restore=True)
@dataclasses.dataclass
class TreeRestore(ocp.args.CheckpointArgs):
    """Restores a pytree.

    Attributes:
      item: the tree with abstract leaves, `jax.ShapeDtypeStruct`s with shardings; None
        restores it as it was saved.
      partial_restore: whether leaves that were saved may be left out.
    """

    item: Any = None
    partial_restore: bool = False


def _write(
    directory: epath.Path,
    captured: Captured,
    description: StepDescription,
    is_own: Callable[[int, boxes.Box], bool],
) -> None:
    # This host's boxes, durably, and then their manifest.
    host = step_manifests.this_host()
    contents = Contents(
        leaves=captured.leaves, components={}, trees=description.notes(()).trees
    )
    step = captured_step.CapturedStep(
        captured,
        contents,
        {},
        is_own=is_own,
        identity=(step_manifests.RUN, step_manifests.STEP, step_manifests.SAVE),
        host=host,
    )
    arrays = orbax_format.stored_arrays(description.trees, step.chunk_shapes)
    store = ocdbt.store_name(host.id, step_manifests.SAVE)
    context = ocdbt.new_context()
    own = step.offer.manifest.fragments

    def put(batch: np.ndarray) -> list[Fragment]:
        chunks, fragments = [], []
        for number in batch.tolist():
            fragment = own.row(number, contents=contents)
            leaf = contents.leaves[fragment.leaf]
            array, values = arrays[leaf.path], step.values(fragment)
            chunks.append(
                ocdbt.Chunk(leaf=leaf, array=array, box=fragment.box, values=values)
            )
            file = f"{array.checkpointable}/{store}//{array.key(fragment.box)}"
            fragments.append(dataclasses.replace(fragment, file=file))
        ocdbt.write(directory / store, chunks, context)
        return fragments

    batches = uploads.batches(
        np.arange(len(own)),
        own.stored_bytes,
        most_bytes=layout.CHUNK_BYTES,
        most_items=_BATCH_ITEMS,
    )
    with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="upload") as pool:
        fragments = [each for some in pool.map(put, batches) for each in some]
    step_manifests.write_of_item(directory, contents, fragments=fragments)


def _finish(name: str, directory: epath.Path, description: StepDescription) -> None:
    # Merges the stores of all hosts, and adds what Orbax requires beside the values.
    manifests = step_manifests.read_of_item(directory)
    holdings = Holdings.from_offers(
        [Offer(tier="persistent", manifest=each) for each in manifests]
    )
    chunks = backup.chunk_shapes(holdings)
    _write_empty_arrays(directory, holdings.contents, description, chunks)
    stores = [ocdbt.store_name(each.host.id, step_manifests.SAVE) for each in manifests]
    ocdbt.merge(directory, [store for store in stores if (directory / store).exists()])
    files = {
        path.removeprefix(f"{name}/"): text.encode()
        for path, text in description.files(chunks).items()
        if path.startswith(f"{name}/")
    }
    files = {**files, orbax_digests.FILE: orbax_digests.to_bytes(files)}
    for path, content in files.items():
        storage.make_directory((directory / path).parent)
        storage.write_atomic(directory / path, content)


def _write_empty_arrays(
    directory: epath.Path,
    contents: Contents,
    description: StepDescription,
    chunks: Chunks,
) -> None:
    # They have no chunks, but Orbax requires their metadata like that of others.
    arrays = orbax_format.stored_arrays(description.trees, chunks)
    empty = [
        ocdbt.Chunk(
            leaf=leaf,
            array=arrays[leaf.path],
            box=boxes.whole(leaf.shape),
            values=np.empty(leaf.shape, leaf.dtype),
        )
        for leaf in contents.leaves
        if 0 in leaf.shape
    ]
    if empty:
        store = ocdbt.store_name(step_manifests.this_host().id, step_manifests.SAVE)
        ocdbt.write(directory / store, empty, ocdbt.new_context())


def _read(directory: epath.Path, args: TreeRestore) -> Any:
    name = directory.name
    opened = step_manifests.open_step(directory.parent)
    if opened is None or not _has_tree(opened.step.holdings.contents, name):
        logging.warning(
            "%s: plain Orbax saved it, and its values cannot be verified", directory
        )
        wanted = {name: args.item}
        return foreign_steps.load(
            directory.parent, wanted, partial=args.partial_restore
        )[name]
    asked = asked_trees.resolve(
        {name: args.item},
        opened.step.holdings.contents,
        step=opened.step.step,
        partial=args.partial_restore,
    )
    wanted = trees.wanted(asked.read)
    reader = verified_read.VerifiedReader(opened.sources)
    values = recovery.read_leaves(
        opened, wanted, reader, host=step_manifests.this_host(), domain="host"
    )
    made = {leaf.path: leaf.make(values[leaf.path]) for leaf in wanted}
    return asked.filled({name: trees.rebuilt(asked.read[name], name, made)})[name]


def _has_tree(contents: Contents, name: str) -> bool:
    return name in tree_structure.described_trees(contents)
