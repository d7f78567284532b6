"""The hosts of a world, which a checkpointer drives with calls.

A call (`core.calls`) is a method that all hosts, or only host 0, run; the driver
continues with the answers. In a multi-controller world, every process is a driver
(`InEveryProcess`). With a single controller, the controller is the only driver and
reaches the hosts through the sidecar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax
from absl import logging

from elastic_ckpt.checkpoint.host import trees as host_trees
from elastic_ckpt.checkpoint.host.answers import ReadParts
from elastic_ckpt.checkpoint.host.endpoint import HostEndpoint
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import CapturedIn, HostSaver
from elastic_ckpt.checkpoint.host.verified_read import OtherTree
from elastic_ckpt.core import allgather, calls, codec
from elastic_ckpt.core.allgather import Allgather
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.step import StepId

# How long a host that leaves after an error waits for the others to leave.
_LEAVING_SECS = 10.0

AnswerT = TypeVar("AnswerT")
P = ParamSpec("P")
# A method that `calls.call` decorates, of any class.
Method = Callable[Concatenate[Any, P], AnswerT]


class Hosts(Protocol):
    """All hosts of a world."""

    @property
    def own(self) -> int:
        """The index of the host whose paths this process uses."""

    @property
    def num_hosts(self) -> int:
        """The number of hosts in the world."""

    @property
    def is_apart(self) -> bool:
        """Whether host `own` is a different process, whose memory is unreachable."""

    def all(
        self, method: Method[P, AnswerT], *args: P.args, **kwargs: P.kwargs
    ) -> list[AnswerT]:
        """Calls a method on every host and returns the answers in host order.

        Calls with the same name must come from one thread at a time, in the same order
        in all drivers.

        Raises:
          HostsFailedError: if the call failed on any host.
          ReplacedError: if a later launch has continued the run.
        """

    def first(
        self, method: Method[P, AnswerT], *args: P.args, **kwargs: P.kwargs
    ) -> AnswerT:
        """Calls a method on host 0 only and returns its answer.

        Raises:
          HostsFailedError: if the call failed.
          ReplacedError: if a later launch has continued the run.
        """

    def gather(self, name: str, value: AnswerT) -> list[AnswerT]:
        """Returns the values of all drivers, in driver order.

        Args:
          name: the name of the values; the rules for calls with the same name apply
            (see `all`).
          value: this driver's value: a dataclass that `codec` can encode, or JSON.
        """

    def capture(self, step_id: StepId, trees: Mapping[str, Any]) -> CapturedIn:
        """Makes every host copy the values in its devices' memory."""

    def opened(self) -> Contents:
        """Returns the contents of the open step (`HostReader.open_step`)."""

    def check(
        self,
        trees: Mapping[str, Any],
        components: Sequence[str],
        others: Mapping[str, OtherTree],
    ) -> int:
        """Selects the parts that `read` reads from the open step.

        Args:
          trees: the requested trees; the step has all of their leaves, with the same
            shapes.
          components: the names of the requested components.
          others: requested trees of a different layout, keyed by name. If the hosts are
            other processes, `check` itself reads these trees, from persistent storage.

        Returns:
          The number of bytes that this process itself has read.

        Raises:
          HostsFailedError: if the step has no such component.
        """

    def read(self, components: Sequence[str]) -> list[ReadParts]:
        """Makes all hosts read and verify the parts that `check` selected.

        Raises:
          HostsFailedError: if no good copy of a part is left.
        """

    def arrays(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        """Builds the trees, including those of other layouts, from the values read.

        Closes the step (`HostReader.close_step`).
        """

    def are_leaving(self, error: BaseException) -> bool:
        """Whether all drivers are leaving, so that they can leave together."""

    def close(self) -> None:
        """Releases the hosts."""


class InEveryProcess:
    """The hosts of a multi-controller world; each process is a host and a driver."""

    is_apart = False

    def __init__(self, own: HostEndpoint, messages: Allgather) -> None:
        self._own = own
        self._messages = messages
        self.own, self.num_hosts = messages.host, messages.num_hosts

    def all(
        self, method: Method[P, AnswerT], *args: P.args, **kwargs: P.kwargs
    ) -> list[AnswerT]:
        """See `Hosts`."""
        call = calls.of(method)
        arguments = call.bind(*args, **kwargs)
        answers = self._gather(
            call.name,
            lambda: call.run(self._own, arguments),
            call.limit_secs,
            call.order,
        )
        # Identical answers are one object: decode it once.
        distinct = {id(each): each for each in answers}
        decoded = {n: call.decode_answer(each) for n, each in distinct.items()}
        return [decoded[id(each)] for each in answers]

    def first(
        self, method: Method[P, AnswerT], *args: P.args, **kwargs: P.kwargs
    ) -> AnswerT:
        """See `Hosts`."""
        call = calls.of(method)
        arguments = call.bind(*args, **kwargs)
        answers = self._gather(
            f"first/{call.name}",
            lambda: call.run(self._own, arguments) if self.own == 0 else None,
            call.limit_secs,
        )
        return call.decode_answer(answers[0])

    def gather(self, name: str, value: AnswerT) -> list[AnswerT]:
        """See `Hosts`."""
        kind = type(value) if dataclasses.is_dataclass(value) else Any
        answers = self._gather(f"share/{name}", lambda: value)
        return [codec.decode(kind, each, name=name) for each in answers]

    def capture(self, step_id: StepId, trees: Mapping[str, Any]) -> CapturedIn:
        """See `Hosts`."""
        saver: HostSaver = self._own.role(HostSaver.__name__)
        return saver.begin(step_id, saver.captured(host_trees.arrays(trees)))

    def opened(self) -> Contents:
        """See `Hosts`."""
        return self._reader.opened()

    def check(
        self,
        trees: Mapping[str, Any],
        components: Sequence[str],
        others: Mapping[str, OtherTree],
    ) -> int:
        """See `Hosts`."""
        self._gather(
            "check",
            lambda: self._reader.select(host_trees.wanted(trees), components, others),
        )
        return 0

    def read(self, components: Sequence[str]) -> list[ReadParts]:
        """See `Hosts`."""
        return self.all(HostReader.read, tuple(components))

    def arrays(self, trees: Mapping[str, Any]) -> dict[str, Any]:
        """See `Hosts`."""
        arrays = self._reader.arrays(trees)
        # No other host needs the step anymore.
        self._reader.close_step()
        return arrays

    def are_leaving(self, error: BaseException) -> bool:
        """See `Hosts`."""
        # On CPU, a lost connection is a ValueError.
        is_of_devices = isinstance(error, jax.errors.JaxRuntimeError) or (
            isinstance(error, ValueError) and "Gloo" in str(error)
        )
        if self.num_hosts > 1 and is_of_devices:
            # A host is gone or has left a computation, so waiting would be pointless.
            return False
        try:
            self._messages.gather("leaving", None, timeout_secs=_LEAVING_SECS)
        except Exception as missing:
            logging.warning("saves in flight are not finished: %s", missing)
            return False
        return True

    def close(self) -> None:
        """See `Hosts`."""
        self._own.close()

    @property
    def _reader(self) -> HostReader:
        return self._own.role(HostReader.__name__)

    def _gather(
        self,
        kind: str,
        work: Callable[[], Any],
        timeout_secs: float = calls.BRIEF_SECS,
        order: allgather.Order = "together",
    ) -> list[Any]:
        outcomes = self._messages.run(
            kind,
            lambda: allgather.outcome(work),
            order=order,
            timeout_secs=timeout_secs,
        )
        return allgather.answers(dict(enumerate(outcomes)))
