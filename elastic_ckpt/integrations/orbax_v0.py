"""Elastic data and verified model state under Orbax v0's `CheckpointManager`.

docs/pages/coming-from/orbax-manager.md shows its use. There are two pairs of arguments:

    TreeSave, TreeRestore          a pytree, with digests of all values
    StatefulSave, StatefulRestore  a `StatefulCheckpointable`: the iterator of
                                   `ec.batches`, a component of `ec.components`

The manager keeps its work: when to save, which steps to keep, the commit. The handlers
do the rest as `ec.Checkpointer` does it without RAM tiers, and write the same format.
Trees are not given to Orbax's own writer, for three reasons: it writes no digest of a
value; to make them, the state would have to be fetched from the devices twice; and its
reader could not compare them when it reads other boxes under another sharding.

Orbax v0 waits at a barrier for hosts that have failed, ten minutes by default. Here the
hosts exchange their outcomes: if one fails, the call fails on all, with its message.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import v1

from elastic_ckpt.checkpoint import (
    asked_trees,
    component_io,
    foreign_steps,
    orbax_format,
    tree_structure,
)
from elastic_ckpt.checkpoint.host import (
    capture,
    captured_step,
    recovery,
    trees,
    upload_share,
    verified_read,
)
from elastic_ckpt.checkpoint.step_description import StepDescription
from elastic_ckpt.core import allgather, errors
from elastic_ckpt.integrations import orbax_v0_steps as steps
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.captured import Captured
from elastic_ckpt.tiers.persistent import upload

__all__ = [
    "StatefulHandler",
    "StatefulRestore",
    "StatefulSave",
    "TreeHandler",
    "TreeRestore",
    "TreeSave",
]


class _ItemHandler(ocp.AsyncCheckpointHandler):
    # A handler of items of steps; all processes make the same calls. Hosts wait
    # `timeout_secs` for each other in one stage of a save, or for a restore.

    def __init__(self, *, timeout_secs: float = 600.0) -> None:
        self._messages = allgather.new()
        self._timeout_secs = timeout_secs

    @abc.abstractmethod
    def begin(
        self, name: str, directory: epath.Path, item: Any
    ) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """Takes the state of an item now; its directory may not exist yet.

        Returns:
          The writer of this host's part; and what host 0 calls with the result of its
          writer, after all hosts have written.
        """

    async def async_save(self, directory: epath.Path, args: Any) -> list[Any]:
        """Takes the state of the item; the future writes it.

        Raises:
          HostsFailedError: if another host cannot take its state.
          Exception: as `begin`.
        """
        name = steps.item_name(directory)
        write, finish = self.agreed(
            f"begin/{name}", lambda: self.begin(name, directory, args.item)
        )

        def write_item() -> Any:
            if not steps.is_item(directory, timeout_secs=self._timeout_secs):
                self.save(directory)
            return write()

        async def commit() -> None:
            written = self.agreed(f"write/{name}", write_item)
            is_first = self._messages.host == 0
            self.agreed(f"finish/{name}", lambda: is_first and finish(written))

        future = ocp.future.CommitFutureAwaitingContractedSignals
        return [future(commit(), name=f"save {name}")]

    def save(self, directory: epath.Path, *args: Any, **more: Any) -> None:
        """Raises a CheckpointError: Orbax calls it only where there are no items."""
        del args, more
        raise errors.CheckpointError(
            f"{directory} would be a whole checkpoint, but the handlers of"
            " elastic_ckpt write items of a checkpoint; save through"
            " ocp.CheckpointManager, or with ocp.args.Composite(state=...) through a"
            " CompositeCheckpointHandler"
        )

    def agreed(self, kind: str, work: Callable[[], Any]) -> Any:
        """The result of `work`; its error, or a HostsFailedError if others failed."""
        result: Any = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        problems = self._messages.gather(kind, problem, timeout_secs=self._timeout_secs)
        failed = {n: each for n, each in enumerate(problems) if each is not None}
        if failed:
            raise failure or errors.HostsFailedError(failed)
        return result


class TreeHandler(_ItemHandler):
    """Saves and restores pytrees of arrays, numbers, texts and random keys.

    A save copies the state from the devices, and writes it in the background. On disk
    the item is what Orbax's own handler would write, with a CRC-32C for each value.

    Args:
      timeout_secs: how long hosts wait for each other in a stage of a save, or in a
        restore, as `AsyncOptions.timeout_secs`.
    """

    _memory = functools.cached_property(lambda _: capture.Memory())

    def begin(
        self, name: str, directory: epath.Path, item: Any
    ) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """Captures the state of the tree, and returns what writes it.

        Raises:
          CheckpointError: if a leaf cannot be saved; it is named.
        """
        description = StepDescription.from_trees(
            {name: item}, {}, metrics=None, custom_metadata=None
        )
        captured = capture.capture(trees.arrays({name: item}), self._memory)
        number, num_hosts = self._messages.host, self._messages.num_hosts
        owners = captured_step.Owners(captured, number=number, num_hosts=num_hosts)

        def write() -> upload.UploadedStep:
            try:
                return _upload(directory, captured, description, owners.is_own)
            finally:
                captured.release()

        def finish(saved: upload.UploadedStep) -> None:
            chunks = {path: array.chunk for path, array in saved.arrays.items()}
            files = orbax_format.tree_files(name, description.trees[name], chunks)
            steps.add_tree(directory, saved, files, num_hosts=num_hosts)

        return write, finish

    def restore(self, directory: epath.Path, args: TreeRestore | None = None) -> Any:
        """Restores and verifies the tree, under any sharding and number of hosts.

        If plain Orbax wrote the item, its values cannot be verified: a warning is
        logged.

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
      item: the tree; its arrays may be donated once `CheckpointManager.save` has
        returned.
    """

    item: Any


@ocp.args.register_with_handler(TreeHandler, for_restore=True)
@dataclasses.dataclass
class TreeRestore(ocp.args.CheckpointArgs):
    """Restores a pytree.

    Attributes:
      item: the tree with abstract leaves, `jax.ShapeDtypeStruct`s with shardings; None
        restores the tree as it was saved.
      partial_restore: whether `item` may lack leaves that were saved.
    """

    item: Any = None
    partial_restore: bool = False


class StatefulHandler(_ItemHandler):
    """Saves and restores objects that have Orbax v1's methods `save` and `load`.

    For instance the iterator of `ec.batches`, and components of `ec.components`.
    """

    def begin(
        self, name: str, directory: epath.Path, item: Any
    ) -> tuple[Callable[[], Any], Callable[[Any], None]]:
        """Captures the state of the object, and returns what writes it."""
        write = component_io.begin_save({name: item}, lambda _: directory)
        return write, lambda _: steps.add_files(directory)

    def restore(self, directory: epath.Path, args: StatefulRestore) -> Any:
        """Loads the saved state into the object, and returns the object.

        Raises:
          CheckpointError: if a file is not what was saved.
          Exception: as the method `load` of the object.
        """

        def load() -> None:
            steps.verify_files(directory)
            component_io.load(args.item, directory)

        self.agreed(f"restore/{directory.name}", load)
        return args.item

    @classmethod
    def typestr(cls) -> str:
        """The name on disk, by which Orbax v1 finds its own handler."""
        return orbax_format.handler_name("StatefulCheckpointableHandler")


@ocp.args.register_with_handler(StatefulHandler, for_save=True)
@dataclasses.dataclass
class StatefulSave(ocp.args.CheckpointArgs):
    """Saves an object, for instance the iterator of `ec.batches`.

    Attributes:
      item: the object; it may change again once `CheckpointManager.save` has returned.
    """

    item: v1.StatefulCheckpointable


@ocp.args.register_with_handler(StatefulHandler, for_restore=True)
@dataclasses.dataclass
class StatefulRestore(ocp.args.CheckpointArgs):
    """Restores an object, for instance the iterator of `ec.batches`.

    Attributes:
      item: the object, into which the saved state is loaded.
    """

    item: v1.StatefulCheckpointable


def _upload(
    directory: epath.Path,
    captured: Captured,
    description: StepDescription,
    is_own: captured_step.IsOwn,
) -> upload.UploadedStep:
    # Writes this host's boxes of a tree, durably, and then their manifest.
    host, (run, step_id) = steps.this_host(), steps.OF_ITEM
    contents = Contents(
        leaves=captured.leaves, components={}, trees=description.notes(()).trees
    )
    source = captured_step.CapturedStep(
        captured, contents, {}, is_own=is_own, identity=steps.OF_ITEM, host=host
    )
    arrays = {
        path: dataclasses.replace(array, checkpointable=".")
        for path, array in description.arrays(source.chunk_shapes).items()
    }
    saved = upload.UploadedStep(
        run=run, step_id=step_id, contents=contents, arrays=arrays
    )
    upload_share.upload_share(
        Holdings.from_offers([source.offer]),
        upload.Upload(steps.item_root(directory), saved, host),
        verified_read.VerifiedReader({}),
        host=host,
        captured=source,
    )
    return saved


def _read(directory: epath.Path, args: TreeRestore) -> Any:
    name, partial = directory.name, args.partial_restore
    opened = steps.open_step(directory.parent)
    if opened is None or not _has_tree(opened, name):
        logging.warning(
            "%s: plain Orbax saved it, and its values cannot be verified", directory
        )
        wanted = {name: args.item}
        return foreign_steps.load(directory.parent, wanted, partial=partial)[name]
    asked = asked_trees.resolve(
        {name: args.item},
        opened.step.holdings.contents,
        step=opened.step.step,
        partial=partial,
    )
    leaves = trees.wanted(asked.read)
    reader = verified_read.VerifiedReader(opened.sources)
    placed = recovery.read_leaves(
        opened, leaves, reader, host=steps.this_host(), domain="host"
    )
    made = {leaf.path: leaf.join(placed[leaf.path]) for leaf in leaves}
    return asked.filled({name: trees.rebuilt(asked.read[name], name, made)})[name]


def _has_tree(opened: find.FoundStep, name: str) -> bool:
    return name in tree_structure.described_trees(opened.step.holdings.contents)
