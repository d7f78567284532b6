"""Validation of values that should be identical: device replicas and host values.

A copy in device memory can change without an error (silent corruption). Then one
replica trains with different weights than the others, and which of them is saved is a
matter of chance. `validate` compares the copies of each leaf of a tree:

* for a JAX array, between the devices that store the same box of its sharding
* for NumPy and Python values, and in a multi-process world for arrays on a single
  process's devices, between the hosts, each of which stores the whole value

Each device digests its parts (`device_digests`), and hosts exchange digests through
JAX's coordination service: first one digest for all boxes that are stored on the same
hosts, then, if those differ, one per box. So if all copies are identical, hosts
exchange only a few bytes.

A box with a single copy is not read. Devices count differing elements only in arrays
that differ.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from absl import logging
from jax.sharding import Sharding

from elastic_ckpt.checkpoint.components import device_digests
from elastic_ckpt.core import (
    allgather,
    boxes,
    codec,
    digest,
    errors,
    events,
    metrics,
    topology,
)

Level: TypeAlias = Literal["none", "quick", "tensor", "full"]
LEVELS = ("none", "quick", "tensor", "full")
Groups: TypeAlias = "tuple[tuple[Replica, ...], ...]"

_MOST_FINDINGS = 100


class Replica(NamedTuple):
    """The memory that holds a copy.

    Attributes:
      host: the index of the host.
      device: JAX's device ID; -1 for host memory.
    """

    host: int
    device: int

    def __str__(self) -> str:
        device = f"device {self.device} of " if self.device >= 0 else ""
        return f"{device}host {self.host}"


# A copy of a box: the index of the leaf in the tree, the box, the copy's holder, and a
# digest of its content.
_Copy: TypeAlias = tuple[int, boxes.Box, Replica, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A part of a leaf whose copies should be identical but differ.

    Attributes:
      leaf: the path of the leaf, such as `opt_state/1/0/mu/embedding`.
      box: the part of the leaf, such as `[0:64, 0:32]`; empty for the whole value.
      groups: the holders, grouped by identical copies; the largest group comes first.
      differing: the number of elements that differ; None if they were not counted.
      why: a description of the difference, if copies differ in more than their values.
    """

    leaf: str
    box: str = ""
    groups: Groups
    differing: int | None = None
    why: str = ""

    @property
    def is_certain(self) -> bool:
        """Whether one group is larger than all others, so that those are suspects."""
        return len(self.groups[0]) > len(self.groups[1])

    @property
    def suspects(self) -> tuple[Replica, ...]:
        """The holders outside the largest group; all holders if there is a tie."""
        return tuple(sorted(itertools.chain(*self.groups[self.is_certain :])))

    @property
    def hosts(self) -> tuple[int, ...]:
        """The hosts of the suspects."""
        return tuple(sorted({holder.host for holder in self.suspects}))

    @property
    def devices(self) -> tuple[int, ...]:
        """The IDs of the suspects' devices."""
        return tuple(sorted(h.device for h in self.suspects if h.device >= 0))

    def __str__(self) -> str:
        part, who = f"{self.leaf}{self.box}", errors.first_of(map(str, self.suspects))
        more = f": {self.why}" if self.why else ""
        if self.differing:
            more = f", in {self.differing} element{'s' * (self.differing > 1)}"
        if self.is_certain:
            return (
                f"{part} of {who} differs from {len(self.groups[0])} identical"
                f" copies{more}"
            )
        return f"{part} differs between {who}, and any of them may be right{more}"


def validate(
    tree: Any,
    *,
    level: Level = "tensor",
    timeout_secs: float = 600.0,
) -> list[Finding]:
    """Compares the copies of each leaf of a tree; all processes must call this.

    Levels: none: compares nothing. quick: compares the structure of the tree and about
      a thousand elements of each part. tensor: compares the structure and a digest of
      each part, which always finds a single changed bit. full: like tensor, but if
      copies of an array on a mesh differ, also counts the differing elements. For the
      count, devices exchange values over the network, one array at a time, and each
      device needs memory for two more copies of its part.

    Args:
      tree: a pytree of JAX and NumPy arrays, numbers, strings and bytes.
      level: see above.
      timeout_secs: how long hosts wait for each other.

    Returns:
      At most a hundred findings, in leaf order, the same on all hosts.

    Raises:
      CheckpointError: if a leaf cannot be compared.
      ConfigError: if there is no such level.
      RunError: if a host does not answer in time.
    """
    return compared(tree, level=level, timeout_secs=timeout_secs, kind="validation")


def compared(
    tree: Any,
    *,
    level: Level,
    kind: str,
    timeout_secs: float = 600.0,
) -> list[Finding]:
    """Like `validate`, but may be called from different threads.

    Args:
      tree: see `validate`.
      level: see `validate`.
      kind: the name of the exchange; calls of the same kind must come from one thread.
      timeout_secs: see `validate`.
    """
    check_level(level)
    if level == "none":
        return []
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    kinds = {path: _kind(path, leaf) for path, leaf in leaves.items()}
    gather = functools.partial(
        allgather.shared().gather, kind, timeout_secs=timeout_secs
    )
    if len(set(gather(digest.json_digest(kinds)))) > 1:
        return [_structure_finding(gather(kinds))]
    by_group = _copies(list(leaves.values()), is_sample=level == "quick")
    sent = gather({group: _digests(each) for group, each in by_group.items()})
    differ = [
        group
        for group in set().union(*sent)
        if len({each for of_host in sent for each in of_host.get(group, ())}) > 1
    ]
    if not differ:
        return []
    own = [copy for group in differ for copy in by_group.get(group, ())]
    by_box: dict[tuple[int, boxes.Box], list[tuple[str, Replica]]] = {}
    for of_host in gather(codec.encode(own)):
        for copy in codec.decode(tuple[_Copy, ...], of_host, name="copies"):
            number, box, holder, content = copy
            by_box.setdefault((number, box), []).append((content, holder))
    found = [
        (list(leaves)[number], box, _groups(each))
        for (number, box), each in sorted(by_box.items())
        if len({content for content, _ in each}) > 1
    ][:_MOST_FINDINGS]
    counts: dict[str, Mapping[int, int]] = {}
    if level == "full":
        # In the same order on all hosts.
        paths = dict.fromkeys(path for path, *_ in found)
        counts = {path: device_digests.differing(leaves[path]) for path in paths}
    return [
        Finding(
            leaf=path,
            box=str(box) if box.start else "",
            groups=groups,
            differing=counts.get(path, {}).get(groups[0][0].device),
        )
        for path, box, groups in found
    ]


def report(step: int, findings: Sequence[Finding], *, emit: events.Emit) -> None:
    """Logs the findings after a step; also reports them as events and in a metric."""
    if findings:
        metrics.VALIDATION_FINDINGS.record(len(findings))
    for finding in findings:
        logging.error("step %d: copies differ: %s", step, finding)
        emit(
            "replicas_differ",
            step=step,
            leaf=finding.leaf,
            hosts=list(finding.hosts),
            devices=list(finding.devices),
            is_certain=finding.is_certain,
            why=str(finding),
        )


def check_level(level: str) -> None:
    """Raises a ConfigError unless `level` is a level of `validate`."""
    if level not in LEVELS:
        raise errors.ConfigError(
            f"level={level!r} is not a validation level; choose one of"
            f" {', '.join(LEVELS)}"
        )


def _structure_finding(of_hosts: Sequence[Mapping[str, str]]) -> Finding:
    # The first leaf that some hosts lack or whose type, shape or dtype differs.
    listed = {
        path: [kinds.get(path, "missing") for kinds in of_hosts]
        for path in sorted(set().union(*of_hosts))
    }
    path, kinds = next(each for each in listed.items() if len(set(each[1])) > 1)
    each = ", ".join(f"host {n}: {kind}" for n, kind in enumerate(kinds))
    groups = _groups((kind, Replica(n, -1)) for n, kind in enumerate(kinds))
    return Finding(leaf=path, groups=groups, why=f"the trees differ ({each})")


def _groups(contents: Iterable[tuple[str, Replica]]) -> Groups:
    # Groups holders by content; the largest group comes first.
    groups: dict[str, list[Replica]] = {}
    for content, holder in sorted(contents):
        groups.setdefault(content, []).append(holder)
    return tuple(sorted(map(tuple, groups.values()), key=lambda g: (-len(g), g)))


def _kind(path: str, leaf: Any) -> str:
    if isinstance(leaf, jax.Array):
        spec = getattr(leaf.sharding, "spec", "")
        return f"jax {leaf.dtype}{list(leaf.shape)} {spec}"
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return f"numpy {leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, bool | int | float | complex | str | bytes):
        return type(leaf).__name__
    raise errors.CheckpointError(
        f"leaf {path!r} is of type {type(leaf).__name__}, which cannot be compared;"
        " remove the leaf from the tree, or replace it with arrays, numbers or strings"
    )


def _copies(leaves: list[Any], *, is_sample: bool) -> Mapping[str, list[_Copy]]:
    # This host's copies of boxes with more than one holder, keyed by the hosts of the
    # holders.
    held = [
        _held(leaf.sharding, leaf.shape)
        if isinstance(leaf, jax.Array)
        else _held(None, ())
        for leaf in leaves
    ]
    on_devices = {
        number: leaf
        for number, leaf in enumerate(leaves)
        if held[number] and device_digests.is_readable(leaf)
    }
    contents = device_digests.look(on_devices, is_sample=is_sample)
    by_group: dict[str, list[_Copy]] = collections.defaultdict(list)
    for number, rows in enumerate(held):
        if rows and number not in contents:
            contents[number] = _in_host_memory(leaves[number], is_sample=is_sample)
        for holder, box, group in rows:
            copy = number, box, holder, contents[number][holder.device]
            by_group[group].append(copy)
    return by_group


def _digests(copies: Sequence[_Copy]) -> list[str]:
    # Digests of each box's least and greatest content, which differ if copies on this
    # host differ.
    ordered = sorted((f"{leaf} {box}", content) for leaf, box, _, content in copies)
    return [digest.json_digest(dict(each)) for each in (ordered, ordered[::-1])]


@functools.lru_cache(maxsize=2**14)
def _held(
    sharding: Sharding | None, shape: tuple[int, ...]
) -> tuple[tuple[Replica, boxes.Box, str], ...]:
    # This host's holders of boxes with more than one holder, with the hosts of each
    # box. Values without a sharding, and arrays on one process's devices, are on every
    # host.
    num_hosts = topology.num_hosts()
    if sharding is None:
        own = Replica(topology.this_host(), -1), boxes.whole(()), "hosts"
        return (own,) * (num_hosts > 1)
    is_own = sharding.is_fully_addressable and num_hosts > 1
    held = []
    for box, devices in boxes.devices_by_box(sharding, shape).items():
        hosts = sorted({device.process_index for device in devices})
        group = "hosts" if is_own else ",".join(map(str, hosts))
        if box.volume and (len(devices) > 1 or is_own):
            local = sharding.addressable_devices.intersection(devices)
            held += [(Replica(d.process_index, d.id), box, group) for d in local]
    return tuple(held)


def _in_host_memory(value: Any, *, is_sample: bool) -> dict[int, str]:
    # The digests of a value in host memory, keyed by device.
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        value = np.frombuffer(repr(value).encode(), np.uint8)
    shards = value.addressable_shards if isinstance(value, jax.Array) else ()
    held = {shard.device.id: jax.device_get(shard.data) for shard in shards}
    held = held or {-1: np.asarray(value)}
    if is_sample:
        held = {n: device_digests.host_sample(each) for n, each in held.items()}
    return {n: digest.values_digest(each).hex() for n, each in held.items()}
