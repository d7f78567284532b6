"""The parts of a v0 handler that do not depend on what an item is.

Orbax v0 waits at a barrier for hosts that have failed, ten minutes by default. Here the
hosts exchange their outcomes: if one fails, the call fails on all, with its message.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from etils import epath

from elastic_ckpt.core import allgather, errors
from elastic_ckpt.host.answers import HostsFailedError
from elastic_ckpt.integrations.orbax_v0 import step_manifests

T = TypeVar("T")


class ItemHandler(ocp.AsyncCheckpointHandler):
    """A handler for an item of a step; all processes make the same calls.

    Args:
      timeout_secs: how long hosts wait for each other in one stage of a save, or for a
        restore; as `AsyncOptions.timeout_secs`.
    """

    def __init__(self, *, timeout_secs: float = 600.0) -> None:
        self._messages = allgather.of_this_world()
        self._timeout_secs = timeout_secs

    @abc.abstractmethod
    def begin(
        self, name: str, directory: epath.Path, item: Any
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Takes the state of an item now.

        Args:
          name: of the item.
          directory: of the item, which may not exist yet.
          item: the value.

        Returns:
          The writer of this host's part, and what host 0 calls after all writers.
        """

    async def async_save(self, directory: epath.Path, args: Any) -> list[Any]:
        """Takes the state of the item; the future writes it.

        Raises:
          HostsFailedError: if another host cannot take its state.
          Exception: as `begin`.
        """
        name = step_manifests.item_name(directory)
        write, finish = self.agreed(
            f"begin/{name}", lambda: self.begin(name, directory, args.item)
        )

        def write_item() -> None:
            if (directory / "_CHECKPOINT_METADATA").exists():
                raise _not_an_item(directory)
            write()

        async def commit() -> None:
            self.agreed(f"write/{name}", write_item)
            is_first = self._messages.host == 0
            self.agreed(f"finish/{name}", finish if is_first else _nothing)

        future = ocp.future.CommitFutureAwaitingContractedSignals
        return [future(commit(), name=f"save {name}")]

    def save(self, directory: epath.Path, *args: Any, **more: Any) -> None:
        """Raises a CheckpointError: Orbax calls it only where there are no items."""
        del args, more
        raise _not_an_item(directory)

    def metadata(self, directory: epath.Path) -> Any:
        """Returns None: a stateful object is described by itself alone."""
        del directory
        return None

    def finalize(self, directory: epath.Path) -> None:
        """Makes the manifests of the step; Orbax calls it on host 0, before it commits.

        Raises:
          CheckpointError: if what the hosts wrote cannot be read.
        """
        step_manifests.assemble(directory.parent)

    def close(self) -> None:
        """Does nothing: a handler holds nothing open."""

    def agreed(self, kind: str, work: Callable[[], T]) -> T:
        """The result of `work`, if it succeeded on all hosts.

        Raises:
          HostsFailedError: if it failed on other hosts alone.
          Exception: as `work` here.
        """
        result: list[T] = []
        failure: Exception | None = None
        try:
            result.append(work())
        except Exception as error:
            failure = error
        problem = None if failure is None else f"{type(failure).__name__}: {failure}"
        problems = self._messages.gather(kind, problem, timeout_secs=self._timeout_secs)
        if failure is not None:
            raise failure
        failed = {n: each for n, each in enumerate(problems) if each is not None}
        if failed:
            raise HostsFailedError(failed)
        return result[0]


def _nothing() -> None:
    pass


def _not_an_item(directory: epath.Path) -> errors.CheckpointError:
    return errors.CheckpointError(
        f"{directory} is to be a whole checkpoint, and the handlers of elastic_ckpt"
        " write items of one; save through ocp.CheckpointManager, or with"
        " ocp.args.Composite(state=...) through a CompositeCheckpointHandler"
    )
