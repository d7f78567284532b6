"""Validation of values that should be equal: replicas on devices, values of hosts.

A copy in the memory of a device can change without an error being raised (silent
corruption): one replica then trains on other weights than the others, and which of them
is saved is chance. `validate` compares the copies of each leaf of a tree:

* of a JAX array, the devices that hold the same box of it according to its sharding
* of an array whose devices are all of one process in a world of several, and of values
  of NumPy and Python, the hosts, each of which has the whole value

Each device digests what it holds (`device_digests`), and hosts exchange digests through
JAX's coordination service: first one for all boxes that the same hosts hold; if those
differ, the digests of the boxes. So an agreement costs bytes.

A box with a single holder is compared with nothing, and not read.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    storage,
    topology,
)

Level: TypeAlias = Literal["none", "quick", "tensor", "full"]
LEVELS = ("none", "quick", "tensor", "full")

_MOST_FINDINGS = 100


class Holder(NamedTuple):
    """The memory that a copy is in.

    Attributes:
      host: the number of the host.
      device: the id of the device in JAX; -1 for the memory of the host.
    """

    host: int
    device: int

    def __str__(self) -> str:
        if self.device < 0:
            return f"host {self.host}"
        return f"device {self.device} of host {self.host}"


class Copy(NamedTuple):
    """A copy of a box of a leaf.

    Attributes:
      leaf: the number of the leaf in the tree.
      box: the part of it.
      holder: of the copy.
      content: equal for copies that are equal.
      differing: elements that differ between replicas; None if not compared.
    """

    leaf: int
    box: boxes.Box
    holder: Holder
    content: str
    differing: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A part of a leaf whose copies should be equal and are not.

    Attributes:
      leaf: the path of the leaf, such as `opt_state/1/0/mu/embedding`; empty if the
        trees of the hosts differ in more than one leaf.
      box: the part of the leaf, such as `[0:64, 0:32]`; empty for the whole value.
      groups: hosts and devices by the copy that they hold, those with equal copies
        together; the largest group comes first.
      differing: the number of elements that differ; None if they were not compared.
      why: in what the copies differ, if not in their values.
    """

    leaf: str
    box: str = ""
    groups: tuple[tuple[Holder, ...], ...]
    differing: int | None = None
    why: str = ""

    @property
    def is_certain(self) -> bool:
        """Whether one group is the largest, so that the others are the suspects."""
        first, second, *_ = map(len, self.groups)
        return first > second

    @property
    def suspects(self) -> tuple[Holder, ...]:
        """The holders outside of the largest group; all if no group is the largest."""
        groups = self.groups[1:] if self.is_certain else self.groups
        return tuple(sorted(holder for group in groups for holder in group))

    @property
    def hosts(self) -> tuple[int, ...]:
        """The hosts of the suspects."""
        return tuple(sorted({holder.host for holder in self.suspects}))

    @property
    def devices(self) -> tuple[int, ...]:
        """The ids of the suspects' devices."""
        return tuple(sorted(h.device for h in self.suspects if h.device >= 0))

    def __str__(self) -> str:
        part = f"{self.leaf}{self.box}"
        who = errors.first_of(map(str, self.suspects))
        plural = "s" * (self.differing != 1)
        elements = f", in {self.differing} element{plural}" if self.differing else ""
        why = f": {self.why}" if self.why else ""
        if self.is_certain:
            others = len(self.groups[0])
            return f"{part} of {who} differs from {others} equal copies{elements}{why}"
        return f"{part} differs between {who}{elements}, and either may be right{why}"


def validate(
    tree: Any,
    *,
    level: Level = "tensor",
    timeout_secs: float = 600.0,
) -> list[Finding]:
    """Compares the copies of each leaf of a tree; every process of the world calls it.

    Levels:
      none: compares nothing.
      quick: the structure of the tree, and about a thousand elements of each part.
      tensor: the structure, and a digest of each part. A changed bit is always found.
      full: as tensor, and counts the elements that differ between the replicas of an
        array on a mesh. They cross the network between the devices, an array at a time;
        each device needs memory for two more copies of its part of the largest one.

    Args:
      tree: a pytree of arrays of JAX and NumPy, numbers, texts and bytes.
      level: see above.
      timeout_secs: how long hosts wait for each other.

    Returns:
      The findings, in the order of leaves, the same on all hosts; at most a hundred.

    Raises:
      CheckpointError: if a leaf cannot be compared.
      ConfigError: if there is no such level.
      RunError: if a host did not answer in time.
    """
    return compared(tree, level=level, timeout_secs=timeout_secs, kind="validation")


def compared(
    tree: Any,
    *,
    level: Level,
    kind: str,
    timeout_secs: float = 600.0,
) -> list[Finding]:
    """As `validate`, from a thread of its own.

    Args:
      tree: see `validate`.
      level: see `validate`.
      kind: of the values that hosts exchange: calls of one kind come from one thread.
      timeout_secs: see `validate`.
    """
    check_level(level)
    if level == "none":
        return []
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    structure = {path: _kind(path, leaf) for path, leaf in leaves.items()}
    gather = functools.partial(
        allgather.shared().gather, kind, timeout_secs=timeout_secs
    )
    if len(set(gather(digest.json_digest(structure)))) > 1:
        return _structure_findings(gather(structure))
    by_group = _copies(list(leaves.values()), level)
    digests: dict[str, set[str | None]] = collections.defaultdict(set)
    for of_host in gather({group: _digest(each) for group, each in by_group.items()}):
        for group, value in of_host.items():
            digests[group].add(value)
    differ = {g for g, values in digests.items() if None in values or len(values) > 1}
    own = [each for group in sorted(differ) for each in by_group.get(group, [])]
    return _findings(own, list(leaves), gather) if differ else []


def check_level(level: str) -> None:
    """Raises a ConfigError unless it is a level of `validate`."""
    if level not in LEVELS:
        raise errors.ConfigError(f"level={level!r}; choose one of {', '.join(LEVELS)}")


def _structure_findings(structures: Sequence[Mapping[str, str]]) -> list[Finding]:
    # The first leaf that only some hosts have, or have as another kind: by path, the
    # type, shape and dtype at each host.
    for path in sorted(set().union(*structures)):
        kinds = [structure.get(path, "missing") for structure in structures]
        if len(set(kinds)) > 1:
            each = ", ".join(f"host {n}: {kind}" for n, kind in enumerate(kinds))
            groups = _groups((kind, Holder(n, -1)) for n, kind in enumerate(kinds))
            why = f"the trees differ ({each})"
            return [Finding(leaf=path, groups=groups, why=why)]
    return []


def _findings(
    own: list[Copy],
    paths: list[str],
    gather: Callable[[storage.Json], list[Any]],
) -> list[Finding]:
    # From the copies of this host in groups that differ, and from those of the others.
    by_box: dict[tuple[int, boxes.Box], list[Copy]] = collections.defaultdict(list)
    for sent in gather(codec.encode(own)):
        for copy in codec.decode(tuple[Copy, ...], sent, name="copies"):
            by_box[copy.leaf, copy.box].append(copy)
    findings = []
    for (leaf, box), of_box in sorted(by_box.items(), key=lambda item: item[0]):
        groups = _groups((each.content, each.holder) for each in of_box)
        if len(groups) > 1:
            part = str(box) if box.start else ""
            differing = of_box[0].differing
            findings.append(
                Finding(leaf=paths[leaf], box=part, groups=groups, differing=differing)
            )
    if len(findings) > _MOST_FINDINGS:
        logging.warning("%d parts of leaves differ in all", len(findings))
    return findings[:_MOST_FINDINGS]


def _groups(
    contents: Iterable[tuple[str, Holder]],
) -> tuple[tuple[Holder, ...], ...]:
    # Holders of equal contents; the largest group first.
    groups: dict[str, list[Holder]] = collections.defaultdict(list)
    for content, holder in contents:
        groups[content].append(holder)
    ordered = [tuple(sorted(group)) for group in groups.values()]
    return tuple(sorted(ordered, key=lambda group: (-len(group), group)))


def _kind(path: str, leaf: Any) -> str:
    if isinstance(leaf, jax.Array):
        spec = getattr(leaf.sharding, "spec", "")
        return f"jax {leaf.dtype}{list(leaf.shape)} {spec}"
    if isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject:
        return f"numpy {leaf.dtype}{list(leaf.shape)}"
    if isinstance(leaf, bool | int | float | complex | str | bytes):
        return type(leaf).__name__
    raise errors.CheckpointError(
        f"leaf {path!r} is a {type(leaf).__name__}, which cannot be compared; take it"
        " out of the tree, or replace it by arrays, numbers or texts"
    )


def _copies(
    leaves: list[Any], kind: device_digests.Kind
) -> Mapping[str, Sequence[Copy]]:
    # The copies of this host that have others to be compared with, by the hosts that
    # hold those.
    by_group: dict[str, list[Copy]] = collections.defaultdict(list)
    looked: dict[int, Mapping[jax.Device, device_digests.Looked]] = {}
    on_devices: dict[int, jax.Array] = {}
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, jax.Array):
            if topology.num_hosts() > 1:
                holder = Holder(topology.this_host(), -1)
                content = _of_host(leaf, kind).digest
                copy = Copy(number, boxes.whole(()), holder, content)
                by_group["hosts"].append(copy)
        elif _held(leaf.sharding, leaf.shape):
            if _is_in_device_memory(leaf.sharding):
                on_devices[number] = leaf
                continue
            looked[number] = {
                shard.device: _of_host(np.asarray(shard.data), kind)
                for shard in leaf.addressable_shards
            }
    found = device_digests.look(list(on_devices.values()), kind)
    looked |= dict(zip(on_devices, found, strict=True))
    for number, of_devices in looked.items():
        array = leaves[number]
        for device, box, group in _held(array.sharding, array.shape):
            holder = Holder(device.process_index, device.id)
            copy = Copy(number, box, holder, *of_devices[device])
            by_group[group or f"leaf {number}"].append(copy)
    return by_group


def _digest(copies: Sequence[Copy]) -> str | None:
    # Of the boxes with their contents; None if copies of a box differ here already.
    contents = {(each.leaf, each.box, each.content) for each in copies}
    if len({(leaf, box) for leaf, box, _ in contents}) < len(contents):
        return None
    rows = [[leaf, box.start, box.stop, of_box] for leaf, box, of_box in contents]
    return digest.json_digest(sorted(rows))


@functools.lru_cache(maxsize=2**14)
def _held(
    sharding: Sharding, shape: tuple[int, ...]
) -> tuple[tuple[jax.Device, boxes.Box, str], ...]:
    # The devices of this process that hold a box with other holders; and the hosts that
    # hold it, or nothing if each host may have a separate array.
    is_own = sharding.is_fully_addressable and topology.num_hosts() > 1
    local = sharding.addressable_devices
    held = []
    for box, devices in boxes.holders(sharding, shape).items():
        if not box.volume or (len(devices) == 1 and not is_own):
            continue
        hosts = sorted({device.process_index for device in devices})
        group = "" if is_own else ",".join(map(str, hosts))
        held += [(device, box, group) for device in devices if device in local]
    return tuple(held)


@functools.lru_cache(maxsize=2**14)
def _is_in_device_memory(sharding: Sharding) -> bool:
    device = next(iter(sharding.addressable_devices))
    return sharding.memory_kind in (None, device.default_memory().kind)


def _of_host(value: Any, kind: device_digests.Kind) -> device_digests.Looked:
    if not isinstance(value, np.ndarray | np.generic):
        text = value if isinstance(value, str | bytes) else repr(value)
        content = text.encode() if isinstance(text, str) else text
        values = np.frombuffer(content, np.uint8)
    else:
        values = np.asarray(value)
        if kind == "quick":
            values = device_digests.host_sample(values)
    return device_digests.Looked(digest=digest.values_digest(values).hex())
