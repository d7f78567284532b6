"""Elastic data and components under Orbax v0's `CheckpointManager`.

    manager.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ec.orbax_v0.StatefulSave(batches),
        ),
    )

`StatefulSave` and `StatefulRestore` accept any object with Orbax v1's `save` and `load`
methods, such as an iterator from `ec.batches` or a component from `ec.components`. If
one host fails, the call fails on all hosts with that host's error message.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import v1

from elastic_ckpt.checkpoint import component_io, orbax_format
from elastic_ckpt.core import allgather

__all__ = ["StatefulHandler", "StatefulRestore", "StatefulSave"]

# How long hosts wait for each other; Orbax's `AsyncOptions.timeout_secs` is the same.
_TIMEOUT_SECS = 600.0


class StatefulHandler(ocp.AsyncCheckpointHandler):
    """Saves and restores `StatefulCheckpointable`s; all processes must call it."""

    _hosts = functools.cached_property(lambda _: allgather.new())

    async def async_save(
        self, directory: epath.Path, args: StatefulSave
    ) -> list[ocp.future.Future]:
        """Captures the item's state; the future writes the state."""
        # Without Orbax's suffix for uncommitted directories.
        name = directory.name.partition(".orbax-checkpoint-tmp")[0]
        writers: list[Callable[[], None]] = []

        def begin() -> None:
            writers.append(
                component_io.begin_save({name: args.item}, lambda _: directory)
            )

        self._agreed(f"begin/{name}", begin)

        async def commit() -> None:
            self._agreed(f"write/{name}", *writers)

        signals = ocp.future.CommitFutureAwaitingContractedSignals
        return [signals(commit(), name=f"save {name}")]

    def save(self, directory: epath.Path, args: StatefulSave) -> None:
        """Like `async_save`, but waits."""
        for future in asyncio.run(self.async_save(directory, args)):
            future.result()

    def restore(self, directory: epath.Path, args: StatefulRestore) -> Any:
        """Loads the saved state into the item and returns the item."""
        load = functools.partial(component_io.load, args.item, directory)
        self._agreed(f"restore/{directory.name}", load)
        return args.item

    @classmethod
    def typestr(cls) -> str:
        """The name on disk by which Orbax v1 finds its own handler."""
        return orbax_format.handler_name("StatefulCheckpointableHandler")

    def _agreed(self, kind: str, work: Callable[[], None]) -> None:
        self._hosts.agreed(kind, work, timeout_secs=_TIMEOUT_SECS)


@ocp.args.register_with_handler(StatefulHandler, for_save=True)
@dataclasses.dataclass
class StatefulSave(ocp.args.CheckpointArgs):
    """Saves an object, for example an iterator from `ec.batches`.

    Attributes:
      item: the object, which may change again after `CheckpointManager.save` returns.
    """

    item: v1.StatefulCheckpointable


@ocp.args.register_with_handler(StatefulHandler, for_restore=True)
@dataclasses.dataclass
class StatefulRestore(ocp.args.CheckpointArgs):
    """Restores an object, for example an iterator from `ec.batches`.

    Attributes:
      item: the object into which the saved state is loaded.
    """

    item: v1.StatefulCheckpointable
