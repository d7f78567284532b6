"""A change of slices, planned: the decision, and the bytes that hosts would read.

The decision is that of `elastic.decision`. For the bytes the state of the configured
model is laid out on both meshes, the copies are placed as after a save, the hosts of
slices that are lost are taken away, and the reads of the others are planned: all by the
functions that a run uses, for devices that stand for those of the slices.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from elastic_ckpt.application import configured
from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.config import schema
from elastic_ckpt.core import boxes, errors, topology
from elastic_ckpt.elastic import decision
from elastic_ckpt.steps import failure_domains, placement, read_plan, search
from elastic_ckpt.steps.holdings import Offer, Tier
from elastic_ckpt.steps.manifest import (
    Contents,
    Fragment,
    Fragments,
    Host,
    Leaf,
    Manifest,
)

# The number of a leaf, and a box of it.
_Part = tuple[int, boxes.Box]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostReads:
    """The bytes of the state that a host reads.

    Attributes:
      slice: of the host.
      host: its number in the slice.
      own_bytes: from its own RAM.
      peer_bytes: from the RAM of others.
      storage_bytes: from persistent storage.
    """

    slice: int
    host: int
    own_bytes: int
    peer_bytes: int
    storage_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangePlan:
    """A change of slices.

    Attributes:
      before: the slices of the world that trains, in the order of the mesh.
      lost: of these, those that are gone.
      decided: what the run does.
      mesh: the size of each axis; empty unless it trains.
      rows_per_device: that a device computes at a time; 0 unless it trains.
      reads: of each host, unless it waits.
    """

    before: tuple[int, ...]
    lost: tuple[int, ...]
    decided: decision.Decision
    mesh: Mapping[str, int]
    rows_per_device: int
    reads: tuple[HostReads, ...]


def plan(config: schema.Config, *, before: int, after: int) -> ChangePlan:
    """Plans the change of a run from a number of slices to another one.

    The slices that are lost are the last ones that train.

    Raises:
      ConfigError: if the run cannot train on `before` slices, or has fewer.
    """
    groups = configured.groups(config)
    if not 0 <= after <= groups.number >= before > 0:
        raise errors.ConfigError(
            f"--from {before} --to {after}: the configuration has {groups.number}"
            " slices, each of whole hosts; set `hosts` and `slices`, or choose numbers"
            " within them"
        )
    policy = configured.policy(config, groups)
    work = configured.work(config, groups)
    first = decision.decide(_slices(range(before)), policy, work)
    if not isinstance(first, decision.Train):
        raise errors.ConfigError(f"--from {before}: {first.why}")
    lost = first.slices[len(first.slices) - max(0, before - after) :]
    present = sorted(set(range(max(before, after))) - set(lost))
    decided = decision.decide(_slices(present, first.slices), policy, work)
    planned = ChangePlan(
        before=first.slices,
        lost=lost,
        decided=decided,
        mesh={},
        rows_per_device=0,
        reads=(),
    )
    if not isinstance(decided, decision.Train):
        return planned
    state = _State(
        config, groups, most_slices=max(len(first.slices), len(decided.slices))
    )
    per_slice = work.devices_per_slice
    devices = len(decided.slices) * per_slice
    return dataclasses.replace(
        planned,
        mesh={topology.SLICE_AXIS: len(decided.slices), topology.FSDP_AXIS: per_slice},
        rows_per_device=decided.rows // devices // decided.accumulated,
        reads=state.reads(first.slices, decided.slices),
    )


def _slices(present: Sequence[int], current: Sequence[int] = ()) -> decision.Slices:
    # All have settled.
    return decision.Slices(
        current=frozenset(current), present_secs=dict.fromkeys(present, math.inf)
    )


class _State:
    """The state of a run, laid out on meshes of devices that stand for its own."""

    def __init__(
        self, config: schema.Config, groups: configured.Groups, *, most_slices: int
    ) -> None:
        self._config = config
        self._hosts_per_slice = max(1, groups.full.hosts // groups.number)
        self._devices_per_slice = groups.full.devices // groups.number
        self._devices = _stand_ins(most_slices * self._devices_per_slice)

    def reads(
        self, before: Sequence[int], after: Sequence[int]
    ) -> tuple[HostReads, ...]:
        """The bytes that each host of `after` reads of what those of `before` saved."""
        contents, saved = self._layout(before)
        _, wanted = self._layout(after)
        step = self._step(contents, self._hosts(before), saved, after)
        readers = self._hosts(after)
        planned = read_plan.plan(
            step,
            readers,
            read_plan.Wanted.from_boxes(
                [
                    (number, contents.leaves[leaf].path, box)
                    for number, parts in enumerate(wanted)
                    for leaf, box in parts
                ],
                contents=contents,
            ),
        )
        near: list[collections.Counter[str]] = [collections.Counter() for _ in readers]
        for number in range(len(planned)):
            read = planned.read(number)
            wanted_box = planned.of_wanted[number]
            reader = int(planned.wanted.reader[wanted_box])
            leaf = contents.leaves[planned.wanted.leaf[wanted_box]]
            offer, _ = read.choices[0]
            own = offer.host.id == readers[reader].id
            source = "own" if own else "peer"
            if offer.tier == "persistent":
                source = "storage"
            near[reader][source] += read.piece.volume * np.dtype(leaf.dtype).itemsize
        return tuple(
            HostReads(
                slice=int(host.domains["slice"]),
                host=host.number,
                own_bytes=num_bytes["own"],
                peer_bytes=num_bytes["peer"],
                storage_bytes=num_bytes["storage"],
            )
            for host, num_bytes in zip(readers, near, strict=True)
        )

    def _hosts(self, slices: Sequence[int]) -> list[Host]:
        return [
            Host(
                id=f"{slice_}.{number}",
                number=number,
                domains={"slice": str(slice_), "host": f"{slice_}.{number}"},
            )
            for slice_ in slices
            for number in range(self._hosts_per_slice)
        ]

    def _layout(self, slices: Sequence[int]) -> tuple[Contents, list[list[_Part]]]:
        # The leaves of the state, and the boxes that each host holds.
        devices = self._devices[: len(slices) * self._devices_per_slice]
        mesh = topology.mesh_of(topology.present(len(slices), devices), devices)
        program = configured.program(self._config, mesh)
        leaves = trees.leaves({"state": program.abstract_state})
        paths = sorted(leaves)
        contents = Contents(
            leaves=tuple(
                Leaf(path=path, shape=leaves[path].shape, dtype=leaves[path].dtype.name)
                for path in paths
            ),
            components={},
        )
        per_host = max(1, self._devices_per_slice // self._hosts_per_slice)
        numbers = {device: n // per_host for n, device in enumerate(mesh.devices.flat)}
        held: list[list[_Part]] = [
            [] for _ in range(len(slices) * self._hosts_per_slice)
        ]
        for leaf, path in enumerate(paths):
            shape, sharding = leaves[path].shape, leaves[path].sharding
            parts = {
                (numbers[device], boxes.of_index(index, shape))
                for device, index in sharding.devices_indices_map(shape).items()
            }
            for number, box in sorted(parts):
                held[number].append((leaf, box))
        return contents, held

    def _step(
        self,
        contents: Contents,
        hosts: Sequence[Host],
        saved: Sequence[Sequence[_Part]],
        after: Sequence[int],
    ) -> search.Step:
        # A save of those hosts, with copies, as it is left on the slices `after`.
        offers = list(map(functools.partial(_offer, contents), hosts, saved))
        peers = configured.peers(self._config)
        if peers is not None:
            copied = search.Step.from_offers(offers).holdings
            kinds = peers.domain
            domain = failure_domains.kind_of(hosts, kinds)
            placed = placement.place(
                copied,
                hosts,
                placement.Policy(
                    copies=peers.copies,
                    domain=domain,
                    inner=failure_domains.inner_kind(hosts, kinds, domain),
                    assume_data_parallelism=peers.assume_data_parallelism,
                ),
            )
            parts = {
                host.id: list(of_host)
                for host, of_host in zip(hosts, saved, strict=True)
            }
            for item, target in zip(
                placed.item.tolist(), placed.target.tolist(), strict=True
            ):
                fragment = copied.fragment(int(copied.first_row[item]))
                parts[placed.hosts[target].id].append((fragment.leaf, fragment.box))
            left = [
                _offer(contents, host, parts[host.id])
                for host in hosts
                if int(host.domains["slice"]) in after
            ]
            if left and (step := search.Step.from_offers(left)).complete:
                return step
        # The newest step that was backed up.
        everything = sorted({part for of_host in saved for part in of_host})
        storage_host = Host(id="storage", number=0, domains={})
        return search.Step.from_offers(
            [_offer(contents, storage_host, everything, tier="persistent")]
        )


def _offer(
    contents: Contents, host: Host, parts: Sequence[_Part], *, tier: Tier = "local"
) -> Offer:
    fragments = [
        Fragment(
            leaf=leaf,
            box=box,
            digest=bytes(16),
            file="values",
            offset=0,
            stored_bytes=box.volume * np.dtype(contents.leaves[leaf].dtype).itemsize,
        )
        for leaf, box in parts
    ]
    manifest = Manifest(
        run="",
        step=1,
        save="",
        host=host,
        contents=contents,
        fragments=Fragments.from_rows(fragments, contents=contents),
        component_files=(),
    )
    return Offer(tier=tier, manifest=manifest)


def _stand_ins(number: int) -> list[Any]:
    # No array is made on them. After the first use of JAX their number stays.
    jax.config.update("jax_platforms", "cpu")
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", number)
    return jax.devices()[:number]
