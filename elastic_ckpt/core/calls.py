"""Calls: methods that a driver runs on all hosts of a world.

    class HostSaver:
        @calls.call()
        def digests(self, step_id: StepId, shared: str) -> dict[str, str]: ...

    answers = hosts.all(HostSaver.digests, step_id, shared)

Each host runs the method on its own object of that class. Under a single controller, a
transport carries the method name and arguments to the hosts. The type annotations say
how to encode arguments and answers (`codec`). The decorator says how long callers wait
for an answer and in which order the hosts run the method.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from elastic_ckpt.core import codec, storage
from elastic_ckpt.core.allgather import Order

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

BRIEF_SECS = 600.0
# For calls that wait for storage or the network. If a host dies during a call, the
# coordination service reports the death immediately.
LONG_SECS = 24 * 3600.0

# The calls in all imported modules, by name.
BY_NAME: dict[str, Call] = {}


class Host(Protocol):
    """One host's role objects, one for each class with calls; calls run on them."""

    def role(self, name: str) -> Any:
        """This host's object of the class `name`."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """A method and how transports call it.

    Attributes:
      limit_secs: how long the driver and other hosts wait for an answer.
      order: the order in which hosts run the method, along their tree.
    """

    method: Callable[..., Any]
    limit_secs: float
    order: Order

    @property
    def name(self) -> str:
        """The qualified name, `Class.method`."""
        return self.method.__qualname__

    def run(self, host: Host, arguments: Mapping[str, Any]) -> Any:
        """Runs the method on a host and returns the answer."""
        owner, _, method = self.name.rpartition(".")
        return getattr(host.role(owner), method)(**arguments)

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments by parameter name."""
        bound = inspect.signature(self.method).bind(None, *args, **kwargs).arguments
        return {name: value for name, value in bound.items() if name != "self"}

    def encode(self, arguments: Mapping[str, Any]) -> storage.Json:
        """Encodes the call with its arguments."""
        encoded = {name: codec.encode(value) for name, value in arguments.items()}
        return {"call": self.name, "arguments": encoded}

    def decode_answer(self, encoded: storage.Json) -> Any:
        """Decodes an answer that `codec.encode` encoded."""
        return codec.decode(
            self.hints["return"], encoded, name=f"the answer of {self.name}"
        )

    @functools.cached_property
    def hints(self) -> dict[str, Any]:
        """The types of the parameters and, as `return`, of the answer."""
        return typing.get_type_hints(self.method)


def call(
    *, limit_secs: float = BRIEF_SECS, order: Order = "together"
) -> Callable[[MethodT], MethodT]:
    """Decorates a method that drivers call; see `Call`."""

    def mark(method: MethodT) -> MethodT:
        assert method.__qualname__ not in BY_NAME, method
        BY_NAME[method.__qualname__] = Call(
            method=method, limit_secs=limit_secs, order=order
        )
        return method

    return mark


def of(method: Callable[..., Any]) -> Call:
    """The call of a decorated method."""
    return BY_NAME[method.__qualname__]


def decode(encoded: Any) -> tuple[Call, dict[str, Any]]:
    """Decodes the result of `Call.encode`.

    Raises:
      KeyError: if there is no such call.
      ValueError: if an argument has the wrong type.
    """
    made = BY_NAME[encoded["call"]]
    return made, {
        name: codec.decode(made.hints[name], value, name=f"{made.name}({name})")
        for name, value in encoded["arguments"].items()
    }
