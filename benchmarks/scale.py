"""Suite `scale`: the decisions over 10,000 hosts and 1e6 boxes, on one core.

The world is 100 slices, or one for each 10 hosts if there are fewer, whose hosts hold
100 boxes each: one of each of 100 leaves, no two alike. With the copies that placement
makes, the other decisions see three holders of each box.

* `placement_secs`: from manifests in memory to the copies that give every box a close
  and a distant holder besides its own.
* `search_secs`: from the manifests of two steps to the newest complete one; the newer
  one lacks a host, whose copies are not made yet, and is looked at first.
* `plan_secs`: what all hosts of half as many slices read of the complete step, whose
  leaves are cut in half as many parts for them.
* `uploads_secs`: which host uploads which box and file of the complete step.
* `retention_secs`: which of as many steps as there are hosts are removed.
* `peak_gib`: of a process that makes the world and decides all this.
* `messages_per_host_10k`, `bytes_per_host_10k`: of a save to RAM with copies, at the
  host that passes the most messages of decisions; requests for values are not among
  them.
* `decision_secs_10k`: of that save and of a restore, from manifests on disks to the
  reads of all hosts: processor time of the slowest host in each pass (`scale_world`).
  Objects of the simulation that are there before are left out of garbage collection.
* `traffic_peak_gib_10k`: of the process that simulates all hosts, not of one of them.
* `manifests_secs`: 1e4 manifests of 300 fragments from their bytes, not in the others.

Each size runs in a separate process; `_100`, `_1000` are those of fewer hosts.
"""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import process_memory, report, scale_manifests, scale_traffic
from elastic_ckpt.core import boxes
from elastic_ckpt.steps import (
    holdings,
    manifest,
    manifest_file,
    placement,
    read_plan,
    retention,
    search,
    uploads,
)

_SIZES = (100, 1000, 10_000)
_ROUNDS = 3


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    figures: dict[str, report.Figure] = {}
    for num_hosts in reversed(_SIZES):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            measured = pool.apply(_measured, (num_hosts,))
        ending = "" if num_hosts == max(_SIZES) else f"_{num_hosts}"
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            costs = pool.apply(scale_traffic.measure, (num_hosts,))
        figures |= _traffic(costs, num_hosts)
        for name, samples in measured.items():
            bound = _BOUNDS.get(name, "no bound") if not ending else "growth"
            figures[name + ending] = report.Figure(
                unit=name.rpartition("_")[2], against=bound, samples=tuple(samples)
            )
    return figures


def _traffic(
    costs: tuple[scale_traffic.Cost, scale_traffic.Cost], num_hosts: int
) -> dict[str, report.Figure]:
    saved, restored = costs
    values = {
        "messages_per_host": (saved.messages, "messages", "at most 200"),
        "bytes_per_host": (saved.num_bytes, "bytes", "no bound"),
        "restore_messages_per_host": (restored.messages, "messages", "no bound"),
        "restore_bytes_per_host": (restored.num_bytes, "bytes", "no bound"),
        "decision_secs": (saved.secs + restored.secs, "secs", "at most 10"),
        "traffic_peak_gib": (restored.peak_gib, "gib", "no bound"),
    }
    ending = "10k" if num_hosts == max(_SIZES) else str(num_hosts)
    return {
        f"{name}_{ending}": report.Figure(unit=unit, against=bound, samples=(value,))
        for name, (value, unit, bound) in values.items()
    }


_BOUNDS = {
    "placement_secs": "below 5",
    "search_secs": "below 5",
    "plan_secs": "below 5",
    "uploads_secs": "below 5",
    "retention_secs": "below 5",
    "peak_gib": "below 2",
}


def _measured(num_hosts: int) -> dict[str, list[float]]:
    offers = _world(num_hosts, step=30)
    hosts = [offer.host for offer in offers]
    samples, placed = _timed(
        lambda: placement.place(holdings.Holdings.from_offers(offers), hosts)
    )
    measured = {"placement_secs": samples}
    assert len(placed.item) == 2 * num_hosts * (scale_manifests.LEAVES + 1)
    assert not placed.shortfalls
    copied = _with_copies(offers, placed)
    newer = _world(num_hosts, step=40)[1:]
    measured["search_secs"], searched = _timed(lambda: search.newest([*newer, *copied]))
    assert searched is not None
    assert searched.step == 30
    wanted = _halved(num_hosts)
    readers = hosts[: num_hosts // 2]
    step = searched
    measured["plan_secs"], plan = _timed(lambda: read_plan.plan(step, readers, wanted))
    assert len(plan) == num_hosts * scale_manifests.LEAVES
    measured["uploads_secs"], chosen = _timed(
        lambda: uploads.uploads(step.holdings, hosts)
    )
    assert not len(chosen.missing)
    measured["retention_secs"], deleted = _timed(lambda: _retained(num_hosts))
    assert len(deleted) > num_hosts // 2
    measured["peak_gib"] = [process_memory.resident_bytes("VmHWM") / 2**30]
    texts = [manifest_file.to_bytes(offer.manifest) for offer in copied]
    measured["manifests_secs"], _ = _timed(
        lambda: [manifest_file.parse(text) for text in texts]
    )
    return measured


def _world(num_hosts: int, *, step: int) -> list[holdings.Offer]:
    return [
        holdings.Offer(tier="local", manifest=each)
        for each in scale_manifests.manifests(num_hosts, step=step)
    ]


def _with_copies(
    offers: list[holdings.Offer], placed: placement.Placement
) -> list[holdings.Offer]:
    # The manifests when all copies have arrived.
    table = holdings.Holdings.from_offers(offers)
    row = table.first_row[placed.item]
    is_file = placed.item >= len(table.leaf)
    order = np.argsort(placed.target, kind="stable")
    bounds = np.searchsorted(placed.target[order], np.arange(len(offers) + 1))
    offers_with_copies = []
    for target, offer in enumerate(offers):
        mine = order[bounds[target] : bounds[target + 1]]
        items = placed.item[mine]
        files = [table.files[n] for n in items[is_file[mine]] - len(table.leaf)]
        rows = row[mine[~is_file[mine]]]
        holders = table.holder[rows].tolist()
        got = [offers[holder].manifest.fragments for holder in holders]
        changed = dataclasses.replace(
            offer.manifest,
            fragments=_joined(offer.manifest.fragments, got, table.number[rows]),
            component_files=(*offer.manifest.component_files, *files),
        )
        offers_with_copies.append(holdings.Offer(tier="local", manifest=changed))
    return offers_with_copies


def _joined(
    own: manifest.Fragments, got: list[manifest.Fragments], number: np.ndarray
) -> manifest.Fragments:
    # One fragment of each in `got` behind those of a host's own.
    rows = list(zip(got, number.tolist(), strict=True))
    together = {
        name: np.concatenate(
            [getattr(own, name)]
            + [getattr(fragments, name)[n : n + 1] for fragments, n in rows]
        )
        for name in ("leaf", "digest", "file", "offset", "stored_bytes")
    }
    parts = [own.boxes, *(fragments.boxes.take(np.array([n])) for fragments, n in rows)]
    boxes_of_all = boxes.Boxes(
        start=np.concatenate([part.start for part in parts]),
        stop=np.concatenate([part.stop for part in parts]),
    )
    return manifest.Fragments(boxes=boxes_of_all, files=own.files, **together)


def _halved(num_hosts: int) -> read_plan.Wanted:
    # Half as many hosts, each with parts twice as long.
    reader = np.repeat(np.arange(num_hosts // 2), scale_manifests.LEAVES)
    start = np.stack([reader * 2 * scale_manifests.ROWS, np.zeros_like(reader)], axis=1)
    return read_plan.Wanted(
        reader=reader.astype(np.int32),
        leaf=np.tile(np.arange(scale_manifests.LEAVES, dtype=np.int32), num_hosts // 2),
        boxes=boxes.Boxes(
            start=start, stop=start + np.array([2 * scale_manifests.ROWS, 512])
        ),
    )


def _retained(num_steps: int) -> list[int]:
    from orbax.checkpoint import v1 as ocp

    policies = ocp.training.preservation_policies
    began = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    held = [
        retention.HeldStep(
            step=step,
            time=began + datetime.timedelta(seconds=step),
            metrics={"loss": 1 / (1 + step)},
            complete=True,
        )
        for step in range(num_steps)
    ]
    policy = policies.AnyPreservationPolicy(
        [
            policies.LatestN(3),
            policies.EveryNSteps(100),
            policies.EveryNSeconds(60),
            policies.BestN(get_metric_fn=lambda metrics: -metrics["loss"], n=5),
        ]
    )
    return retention.steps_to_delete(
        held, policy, newest_complete=num_steps - 1, in_flight=[7], preserved=[8]
    )


def _timed(function: Callable[[], Any]) -> tuple[list[float], Any]:
    samples = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        result = function()
        samples.append(time.perf_counter() - began)
    return samples, result
