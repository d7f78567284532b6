"""A save of a simulated world, driven by the product's own stages (`scale_world`)."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from benchmarks import scale_world
from elastic_ckpt.checkpoint import save_stages
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.saving import Saving
from elastic_ckpt.checkpoint.step_description import StepDescription
from elastic_ckpt.manifests.manifest import Manifest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a save.

    Attributes:
      messages: of the host that passes the most of them.
      num_bytes: of the host that sends and receives the most of them.
      secs: from the first request to the last answer, without what is written.
      copies: that hosts would have fetched.
    """

    messages: int
    num_bytes: int
    secs: float
    copies: int


def save(
    num_hosts: int, manifests: Callable[[], Iterator[Manifest]], *, step: int
) -> Cost:
    """Saves a step in a simulated world, to RAM and with copies.

    Args:
      num_hosts: of the world.
      manifests: of all hosts, by number.
      step: that they are of.
    """
    events: list[tuple[str, dict[str, Any]]] = []
    with scale_world.directory() as directory:
        hosts = scale_world.SimulatedHosts(
            pathlib.Path(directory), manifests(), num_hosts
        )
        stages = save_stages.SaveStages(
            cast(Hosts, hosts),
            emit=lambda name, **fields: events.append((name, fields)),
        )
        stages.begin(_saving(step)).result()
        stages.wait()
    names = [name for name, _ in events]
    assert names == ["saved", "replicated"], events
    return Cost(
        messages=max(hosts.traffic.messages.values()),
        num_bytes=max(hosts.traffic.num_bytes.values()),
        secs=hosts.secs,
        copies=events[1][1]["copies"],
    )


def _saving(step: int) -> Saving:
    return Saving(
        step=step,
        save="0",
        write_components=_nothing,
        back_up=False,
        overwrite=False,
        description=StepDescription.from_trees(
            {"n": 1}, {}, metrics=None, custom_metadata=None
        ),
        parents=(),
        began_secs=time.monotonic(),
    )


def _nothing() -> None:
    """The manifests of the step are there already."""
