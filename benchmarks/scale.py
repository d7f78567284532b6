"""Suite `scale`: a save and a restore of 10,000 hosts, driven by the product's stages.

The world is 100 slices, or one for each 10 hosts if there are fewer, whose hosts hold
100 boxes each: one of each of 100 leaves, no two alike. It saves a step with copies,
and restores it when hosts have changed places.

* `messages_per_host_10k`: of a save to RAM with copies, at the host that passes the
  most messages of decisions; requests for values are not among them.
  `restore_messages_per_host_10k` of the restore.
* `decision_secs_10k`: of that save and of a restore, from manifests on disks to the
  reads of all hosts: processor time of the slowest host in each pass (`scale_world`).
  Objects of the simulation that are there before are left out of garbage collection.
* `traffic_peak_gib_10k`: of the process that simulates all hosts, not of one of them.

Each size runs in a separate process; `_100`, `_1000` are those of fewer hosts.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any, cast

from benchmarks import memory, report, scale_world, turns
from elastic_ckpt.checkpoint import restore, save_stages
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.trees import WantedLeaf
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.saving import Saving
from elastic_ckpt.checkpoint.step_description import StepDescription
from elastic_ckpt.core import boxes, events
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.step_id import StepId

_SIZES = {"10k": 10_000, "1000": 1000, "100": 100}
_STEP = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a save or a restore."""

    messages: int  # of the host that passes the most of them
    secs: float  # without what is written and read
    peak_gib: float  # of the process that simulates all hosts


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    figures = {}
    for name, num_hosts in _SIZES.items():
        saved, restored = turns.in_new_process(costs, num_hosts)
        values = {
            "messages_per_host": (saved.messages, "messages", "at most 200"),
            "restore_messages_per_host": (restored.messages, "messages", "no bound"),
            "decision_secs": (saved.secs + restored.secs, "secs", "at most 10"),
            "traffic_peak_gib": (restored.peak_gib, "gib", "no bound"),
        }
        figures |= {
            f"{figure}_{name}": report.figure(unit, bound, [value])
            for figure, (value, unit, bound) in values.items()
        }
    return figures


def costs(num_hosts: int) -> tuple[Cost, Cost]:
    """The costs of a save with copies, and of a restore by hosts in other places."""
    with tempfile.TemporaryDirectory(prefix="scale-", dir="/dev/shm") as directory:
        hosts = scale_world.SimulatedHosts(
            pathlib.Path(directory),
            scale_world.manifests(num_hosts, step=_STEP),
            num_hosts,
        )
        saved = _save(hosts)
        hosts.forget_costs()
        return saved, _restore(hosts, num_hosts)


def _save(hosts: scale_world.SimulatedHosts) -> Cost:
    names: list[str] = []
    stages = save_stages.SaveStages(
        cast(Hosts, hosts), emit=lambda name, **_: names.append(name)
    )
    saving = Saving(
        step_id=StepId(hosts.step, "0"),
        # The manifests of the step are there already.
        write_components=lambda: None,
        back_up=False,
        overwrite=False,
        description=StepDescription.from_trees(
            {"n": 1}, {}, metrics=None, custom_metadata=None
        ),
        parents=(),
        began_secs=time.monotonic(),
    )
    stages.begin(saving).result()
    stages.wait()
    assert names == ["saved", "replicated"], names
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
    answers: list[Any] = hosts.all(HostReader.read)
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
        messages=max(hosts.messages.values()),
        secs=hosts.secs,
        peak_gib=memory.resident_bytes("VmHWM") / 2**30,
    )
