"""A save and a restore of a simulated world, driven by the product's own stages."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any, cast

from benchmarks import process_memory, scale_manifests, scale_world
from elastic_ckpt.checkpoint import restore, save_stages
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.trees import WantedLeaf
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.saving import Saving
from elastic_ckpt.checkpoint.step_description import StepDescription
from elastic_ckpt.core import boxes, events
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.step_id import StepId

_STEP = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a save or a restore.

    Attributes:
      messages: of the host that passes the most of them.
      num_bytes: of the host that sends and receives the most of them.
      secs: from the first request to the last answer, without what is written and read.
      peak_gib: of the process that simulates all hosts, until then.
    """

    messages: int
    num_bytes: int
    secs: float
    peak_gib: float


def measure(num_hosts: int) -> tuple[Cost, Cost]:
    """Saves a step with copies, and restores it when hosts have changed places.

    Args:
      num_hosts: of the world.
    """
    with scale_world.directory() as directory:
        hosts = scale_world.SimulatedHosts(
            pathlib.Path(directory),
            scale_manifests.manifests(num_hosts, step=_STEP),
            num_hosts,
        )
        saved = _save(hosts)
        hosts.forget_costs()
        return saved, _restore(hosts, num_hosts)


def _save(hosts: scale_world.SimulatedHosts) -> Cost:
    events: list[tuple[str, dict[str, Any]]] = []
    stages = save_stages.SaveStages(
        cast(Hosts, hosts),
        emit=lambda name, **fields: events.append((name, fields)),
    )
    stages.begin(_saving(hosts.step)).result()
    stages.wait()
    names = [name for name, _ in events]
    assert names == ["saved", "replicated"], events
    return _cost(hosts)


def _restore(hosts: scale_world.SimulatedHosts, num_hosts: int) -> Cost:
    driver = cast(Hosts, hosts)
    outcome = restore.find(driver, None, emit=events.nobody, is_dealt=True)
    step = outcome.checkpoint
    assert step is not None
    assert outcome.is_dealt
    restore.open_step(driver, step, is_dealt=True)
    contents = hosts.opened()
    hosts.select(lambda number: _wanted(contents, number, num_hosts))
    restore.plan_reads(driver, step, [])
    answers = hosts.all(HostReader.read)
    assert {each["planned"] for each in answers} == {len(contents.leaves)}
    hosts.all(HostReader.close_step)
    return _cost(hosts)


def _wanted(contents: Contents, number: int, num_hosts: int) -> Sequence[WantedLeaf]:
    # The rows that the next host saved.
    wanted = []
    for leaf in contents.leaves:
        rows = leaf.shape[0] // num_hosts
        start = (number + 1) % num_hosts * rows
        box = boxes.Box(start=(start, 0), stop=(start + rows, leaf.shape[1]))
        wanted.append(
            WantedLeaf(
                path=leaf.path,
                shape=leaf.shape,
                boxes=(box,),
                place=lambda _, values: values,
                join=list,
            )
        )
    return wanted


def _cost(hosts: scale_world.SimulatedHosts) -> Cost:
    return Cost(
        messages=max(hosts.traffic.messages.values()),
        num_bytes=max(hosts.traffic.num_bytes.values()),
        secs=hosts.secs,
        peak_gib=process_memory.resident_bytes("VmHWM") / 2**30,
    )


def _saving(step: int) -> Saving:
    return Saving(
        step_id=StepId(step, "0"),
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
