"""The hosts of a world, asked all at once: how the checkpointer has its work done.

Each host has a `HostTiers`, which does all that concerns its RAM disk and its share of
a backup. Whoever drives a save or a restore asks all of them for the next phase and
goes on with all of their answers: in every process of a multi-controller world
(`InEveryProcess`), or in the one controller of many hosts, through the sidecar.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from absl import logging

from elastic_ckpt.checkpoint import exchange
from elastic_ckpt.core import errors
from elastic_ckpt.host.host_tiers import HostTiers
from elastic_ckpt.host.hosts_failed import HostsFailed
from elastic_ckpt.manifests.manifest import Contents

# How long hosts wait for each other. What storage or a network takes its time for may
# take hours; of a host that dies the coordination service tells at once.
_PATIENCE_SECS = 600.0
_LONG_SECS = 24 * 3600.0
_LONG_PHASES = frozenset({"saver.replicate", "backup.back_up", "first/backup.commit"})


class Hosts(Protocol):
    """All hosts of a world."""

    @property
    def own(self) -> int:
        """The number of the host whose paths mean the same to this process."""
        ...

    def all(self, phase: str, *arguments: Any) -> list[Any]:
        """What a phase of `HostTiers` returned on each host, in their order.

        Calls of one phase come from one thread at a time, in the same order wherever
        the world is driven. Arguments and answers are JSON.

        Raises:
          HostsFailed: if it raised on any; no host goes on as if all had done it.
        """
        ...

    def first(self, phase: str, *arguments: Any) -> Any:
        """What it returned on host 0, the only one that is asked."""
        ...

    def capture(self, step: int, save: str, trees: Mapping[str, Any]) -> str:
        """Has every host copy what its devices hold.

        Returns:
          The directory in which components write their files, each below its name.
        """
        ...

    def opened(self) -> Contents:
        """The contents of the step that was opened (`reader.open_step`)."""
        ...

    def check(self, trees: Mapping[str, Any], components: Sequence[str]) -> None:
        """Turns to what is wanted of the step that was opened.

        Args:
          trees: that are wanted; the step has all of their leaves, in their shapes.
          components: that are wanted.

        Raises:
          HostsFailed: if it has no such component.
        """
        ...

    def arrays(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        """The trees, made of what the hosts have read last."""
        ...

    def close(self) -> None:
        """Lets go of the hosts."""
        ...


class InEveryProcess:
    """The hosts of a multi-controller world: each process drives, and does its part.

    Args:
      own: of this process.
      exchange: with the others.
    """

    def __init__(self, own: HostTiers, exchange: exchange.Exchange) -> None:
        self._own = own
        self._exchange = exchange

    @property
    def own(self) -> int:
        """See `Hosts`."""
        return self._exchange.host

    def all(self, phase: str, *arguments: Any) -> list[Any]:
        """See `Hosts`."""
        return self._gather(phase, self._answer(phase, *arguments))

    def first(self, phase: str, *arguments: Any) -> Any:
        """See `Hosts`."""
        answer: dict[str, Any] = {"is": None}
        if self._exchange.host == 0:
            answer = self._answer(phase, *arguments)
        return self._gather(f"first/{phase}", answer)[0]

    def capture(self, step: int, save: str, trees: Mapping[str, Any]) -> str:
        """See `Hosts`."""
        return self._own.saver.capture(step, save, trees)

    def opened(self) -> Contents:
        """See `Hosts`."""
        return self._own.reader.opened()

    def check(self, trees: Mapping[str, Any], components: Sequence[str]) -> None:
        """See `Hosts`."""
        self.all("reader.check", trees, components)

    def arrays(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        """See `Hosts`."""
        return self._own.reader.arrays(trees)

    def close(self) -> None:
        """See `Hosts`."""
        self._own.close()

    def _answer(self, phase: str, *arguments: Any) -> dict[str, Any]:
        try:
            return {"is": self._own.answer(phase, *arguments)}
        except (errors.ElasticCkptError, OSError) as error:
            return {"failed": str(error)}
        except Exception as error:
            # A bug ends this call on all hosts, not only here, where nobody looks.
            logging.exception("%s failed", phase)
            last = traceback.format_exception_only(error)[-1].strip()
            return {"failed": f"{phase} failed with {last}; see this host's log"}

    def _gather(self, kind: str, answer: dict[str, Any]) -> list[Any]:
        patience = _LONG_SECS if kind in _LONG_PHASES else _PATIENCE_SECS
        answers = self._exchange.gather(kind, answer, timeout_secs=patience)
        failed = {
            number: each["failed"]
            for number, each in enumerate(answers)
            if "failed" in each
        }
        if failed:
            raise HostsFailed(failed)
        return [each["is"] for each in answers]
