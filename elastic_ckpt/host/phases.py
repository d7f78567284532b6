"""The requests that hosts run, in one table, with the time limit of each.

A request is a frozen dataclass whose method `run` does the work on one host. Its name
on the wire is that of its class, and the annotation of what `run` returns decodes the
answer, so a transport names no request.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from elastic_ckpt.core import codec, storage
from elastic_ckpt.host import (
    backup_requests,
    copy_requests,
    part_requests,
    read_requests,
    save_requests,
    sharing_requests,
    world_requests,
)

HostT = TypeVar("HostT", contravariant=True)
AnswerT = TypeVar("AnswerT", covariant=True)

BRIEF_SECS = 600.0
# For what storage or a network limits. If a host dies meanwhile, the coordination
# service reports it at once.
LONG_SECS = 24 * 3600.0


class Request(Protocol[HostT, AnswerT]):
    """A request of a driver to a host; its fields are the arguments."""

    def run(self, host: HostT) -> AnswerT:
        """Does the work on a host, and returns the answer."""
        ...


class Phases:
    """The requests of a kind of hosts.

    Args:
      limits_secs: by request, how long the driver and other hosts wait for an answer.
    """

    def __init__(self, limits_secs: Mapping[type[Any], float]) -> None:
        self.limits_secs = dict(limits_secs)
        self._by_name = {kind.__name__: kind for kind in limits_secs}

    def limit_secs(self, request: Request[Any, Any]) -> float:
        """Returns how long to wait for the answers to a request."""
        return self.limits_secs[type(request)]

    def encode(self, request: Request[Any, Any]) -> storage.Json:
        """Encodes a request, with its name."""
        return {"request": type(request).__name__, "fields": codec.encode(request)}

    def decode(self, encoded: Any) -> Request[Any, Any]:
        """Decodes what `encode` returned."""
        name = encoded["request"]
        return codec.decode(self._by_name[name], encoded["fields"], name=name)


def channel(request: Request[Any, Any]) -> str:
    """The name under which drivers gather the answers to a request.

    It is that of its class, unless several threads send requests of one class.
    """
    return getattr(request, "channel", type(request).__name__)


def decode_answer(request: Request[Any, AnswerT], encoded: storage.Json) -> AnswerT:
    """Decodes the answer to a request, which `codec.encode` encoded."""
    name = f"the answer to {type(request).__name__}"
    return codec.decode(_answer_kind(type(request)), encoded, name=name)


@functools.cache
def _answer_kind(kind: type[Request[Any, Any]]) -> Any:
    return typing.get_type_hints(kind.run)["return"]


_LONG = {
    copy_requests.ReplicateStep,
    backup_requests.CleanUploads,
    backup_requests.ListStepsInRam,
    backup_requests.GetSavedContents,
    backup_requests.GetChunkShapes,
    backup_requests.BackUpStep,
    backup_requests.CommitBackup,
    backup_requests.CollectBackups,
    backup_requests.RemoveBackup,
    read_requests.ReadStep,
    read_requests.MaterialiseComponent,
    read_requests.RepairCopies,
}


def limits_secs(*modules: types.ModuleType) -> dict[type[Any], float]:
    """Returns the time limits of the requests that modules define."""
    return {
        kind: LONG_SECS if kind in _LONG else BRIEF_SECS
        for module in modules
        for kind in vars(module).values()
        if hasattr(kind, "run") and kind.__module__ == module.__name__
    }


PHASES = Phases(
    limits_secs(
        world_requests,
        save_requests,
        copy_requests,
        backup_requests,
        read_requests,
        sharing_requests,
        part_requests,
    )
)
