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
* `manifests_secs`: 1e4 manifests of 300 fragments from their bytes, not in the others.

Each size runs in a separate process; `_100`, `_1000` are those of fewer hosts.
"""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import process_memory, report
from elastic_ckpt.core import boxes
from elastic_ckpt.manifests import (
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
_LEAVES = 100
_BOXES_A_HOST = 100
_ROWS = 16
_ROUNDS = 3
_BOX_BYTES = 2**20


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    figures: dict[str, report.Figure] = {}
    for num_hosts in reversed(_SIZES):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            measured = pool.apply(_measured, (num_hosts,))
        ending = "" if num_hosts == max(_SIZES) else f"_{num_hosts}"
        for name, samples in measured.items():
            bound = _BOUNDS.get(name, "no bound") if not ending else "growth"
            figures[name + ending] = report.Figure(
                unit=name.rpartition("_")[2], against=bound, samples=tuple(samples)
            )
    return figures


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
    assert len(placed.item) == 2 * num_hosts * (_BOXES_A_HOST + 1)
    assert not placed.shortfalls
    copied = _with_copies(offers, placed)
    newer = _world(num_hosts, step=40)[1:]
    measured["search_secs"], searched = _timed(lambda: search.search([*newer, *copied]))
    assert searched.newest is not None
    assert searched.newest.step == 30
    wanted = _halved(num_hosts)
    readers = hosts[: num_hosts // 2]
    step = searched.newest
    measured["plan_secs"], plan = _timed(lambda: read_plan.plan(step, readers, wanted))
    assert len(plan) == num_hosts * _BOXES_A_HOST
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


def _contents(num_hosts: int) -> manifest.Contents:
    shape = (num_hosts * _ROWS, 512)
    leaves = [
        manifest.Leaf(path=f"params/layer_{number:03d}/w", shape=shape, dtype="float32")
        for number in range(_LEAVES)
    ]
    return manifest.Contents(leaves=tuple(leaves), components={"data": num_hosts})


def manifests(num_hosts: int, *, step: int) -> Iterator[manifest.Manifest]:
    """The manifests that hosts write when they save, by number."""
    contents = _contents(num_hosts)
    slice_hosts = max(10, num_hosts // 100)
    generator = np.random.default_rng(step)
    for number in range(num_hosts):
        yield manifest.Manifest(
            run="scale",
            step=step,
            save="0",
            host=manifest.Host(
                id=f"host-{number:05d}.0",
                number=number,
                domains={"slice": str(number // slice_hosts)},
            ),
            contents=contents,
            fragments=_fragments(number, generator),
            component_files=(
                manifest.ComponentFile(
                    component="data",
                    parts=(number, number + 1),
                    path=f"data/shards-{number:05d}-{number:05d}.json",
                    digest=generator.bytes(16),
                    stored_bytes=150,
                ),
            ),
        )


def _world(num_hosts: int, *, step: int) -> list[holdings.Offer]:
    return [
        holdings.Offer(tier="local", manifest=each)
        for each in manifests(num_hosts, step=step)
    ]


def _fragments(number: int, generator: np.random.Generator) -> manifest.Fragments:
    start = np.tile([number * _ROWS, 0], (_LEAVES, 1))
    return manifest.Fragments(
        leaf=np.arange(_LEAVES, dtype=np.int32),
        boxes=boxes.Boxes(start=start, stop=start + np.array([_ROWS, 512])),
        digest=generator.integers(0, 2**64, (_LEAVES, 2), np.uint64),
        file=np.zeros(_LEAVES, np.int32),
        offset=np.arange(_LEAVES) * _BOX_BYTES,
        stored_bytes=np.full(_LEAVES, _BOX_BYTES),
        files=("arrays.bin",),
    )


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
    reader = np.repeat(np.arange(num_hosts // 2), _LEAVES)
    start = np.stack([reader * 2 * _ROWS, np.zeros_like(reader)], axis=1)
    return read_plan.Wanted(
        reader=reader.astype(np.int32),
        leaf=np.tile(np.arange(_LEAVES, dtype=np.int32), num_hosts // 2),
        boxes=boxes.Boxes(start=start, stop=start + np.array([2 * _ROWS, 512])),
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
