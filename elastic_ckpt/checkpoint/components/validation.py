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

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import numpy as np
from absl import logging
from jax.sharding import Sharding

from elastic_ckpt.checkpoint.components import device_digests, replicas
from elastic_ckpt.checkpoint.components.replicas import Copies, Finding, Holder
from elastic_ckpt.core import allgather, boxes, digest, errors, storage, topology

Level: TypeAlias = Literal["none", "quick", "tensor", "full"]
LEVELS = ("none", "quick", "tensor", "full")

# How many leaves hosts exchange digests of at a time, if some differ.
_LEAVES_A_TURN = 256
_MOST_FINDINGS = 100
_KINDS: Mapping[str, device_digests.Kind] = {
    "quick": "sample",
    "tensor": "digest",
    "full": "compare",
}
_EQUAL = "equal"


def validate(
    tree: Any,
    *,
    level: Level = "tensor",
    tolerance: float = 0.0,
    timeout_secs: float = 600.0,
) -> list[Finding]:
    """Compares the copies of each leaf of a tree; every process of the world calls it.

    Levels:
      none: compares nothing.
      quick: the structure of the tree, and about a thousand elements of each part.
      tensor: the structure, and a digest of each part. A changed bit is always found.
      full: the structure, and the replicas of arrays on a mesh element by element. They
        cross the network between the devices, an array at a time; each device needs
        memory for two more copies of its part of the largest one.

    Args:
      tree: a pytree of arrays of JAX and NumPy, numbers, texts and bytes.
      level: see above.
      tolerance: at level full, the largest difference of elements of floating point,
        absolute and relative to the first replica, that is no finding.
      timeout_secs: how long hosts wait for each other.

    Returns:
      The findings, in the order of leaves, the same on all hosts; at most a hundred.

    Raises:
      CheckpointError: if a leaf cannot be compared.
      ConfigError: if there is no such level.
      RunError: if a host did not answer in time.
    """
    check_level(level)
    if level == "none":
        return []
    return compared(
        tree,
        level=level,
        tolerance=tolerance,
        timeout_secs=timeout_secs,
        kind="validation",
    )


def compared(
    tree: Any,
    *,
    level: Level,
    kind: str,
    tolerance: float = 0.0,
    timeout_secs: float = 600.0,
) -> list[Finding]:
    """As `validate`, from a thread of its own.

    Args:
      tree: see `validate`.
      level: see `validate`.
      kind: of the values that hosts exchange: calls of one kind come from one thread.
      tolerance: see `validate`.
      timeout_secs: see `validate`.
    """
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    structure = {path: _kind(path, leaf) for path, leaf in leaves.items()}
    gather = functools.partial(
        allgather.shared().gather, kind, timeout_secs=timeout_secs
    )
    if len(set(gather(digest.json_digest(structure)))) > 1:
        finding = replicas.structure_finding(gather(structure))
        return [] if finding is None else [finding]
    by_group = _copies(list(leaves.values()), _KINDS[level], tolerance)
    digests = {group: _group_digest(copies) for group, copies in by_group.items()}
    groups = _differing(gather(digests))
    own = [each for group in groups for each in by_group.get(group, [])]
    return _findings(own, list(leaves), gather) if groups else []


def check_level(level: str) -> None:
    """Raises a ConfigError unless it is a level of `validate`."""
    if level not in LEVELS:
        raise errors.ConfigError(f"level={level!r}; choose one of {', '.join(LEVELS)}")


def _findings(
    own: list[Copies],
    paths: list[str],
    gather: Callable[[storage.Json], list[Any]],
) -> list[Finding]:
    # From the copies of this host in groups that differ, and from those of the others.
    findings: list[Finding] = []
    for first in range(0, len(paths), _LEAVES_A_TURN):
        turn = range(first, first + _LEAVES_A_TURN)
        sent = gather([each.to_json() for each in own if each.leaf in turn])
        copies = [Copies.from_json(each) for of_host in sent for each in of_host]
        findings += replicas.findings(copies, paths)
        if len(findings) >= _MOST_FINDINGS:
            logging.warning(
                "more leaves may differ than the %d reported", len(findings)
            )
            break
    return findings[:_MOST_FINDINGS]


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


# By the hosts that hold the copies.
_ByGroup = dict[str, list[Copies]]


def _copies(leaves: list[Any], kind: device_digests.Kind, tolerance: float) -> _ByGroup:
    # The copies of this host that have others to be compared with.
    by_group: _ByGroup = {}
    on_devices: list[tuple[int, jax.Array]] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array):
            if not _held(leaf.sharding, leaf.shape):
                continue
            if _is_in_device_memory(leaf.sharding):
                on_devices.append((number, leaf))
            else:
                of_devices = {
                    shard.device: _of_host(np.asarray(shard.data), kind)
                    for shard in leaf.addressable_shards
                }
                _add(by_group, number, leaf, of_devices)
        elif topology.num_hosts() > 1:
            copy = Copies(
                leaf=number,
                box=boxes.whole(()),
                content=_of_host(leaf, kind).digest,
                holders=(Holder(topology.this_host(), -1),),
            )
            by_group.setdefault("hosts", []).append(copy)
    looked = device_digests.look(
        [array for _, array in on_devices], kind, tolerance=tolerance
    )
    for (number, array), of_devices in zip(on_devices, looked, strict=True):
        _add(by_group, number, array, of_devices)
    return by_group


def _add(
    by_group: _ByGroup,
    number: int,
    array: jax.Array,
    looked: Mapping[jax.Device, device_digests.Looked],
) -> None:
    of_box: dict[tuple[str, boxes.Box, str, int | None], list[Holder]] = {}
    for device, box, group in _held(array.sharding, array.shape):
        differing = looked[device].differing
        content = _EQUAL if differing == 0 else looked[device].digest
        key = (group or f"leaf {number}", box, content, differing)
        holder = Holder(device.process_index, device.id)
        of_box.setdefault(key, []).append(holder)
    for (group, box, content, differing), holders in of_box.items():
        by_group.setdefault(group, []).append(
            Copies(number, box, content, tuple(holders), differing)
        )


def _group_digest(copies: list[Copies]) -> list[storage.Json]:
    # The digest of the boxes with their contents, and whether copies of one differ.
    ordered = sorted((each.leaf, each.box, each.content) for each in copies)
    rows = [[leaf, box.start, box.stop, content] for leaf, box, content in ordered]
    boxes_held = {(each.leaf, each.box) for each in copies}
    return [digest.json_digest(rows), len(boxes_held) < len(copies)]


def _differing(answers: list[dict[str, list[Any]]]) -> list[str]:
    # The groups of which the hosts have different digests, or one different copies.
    digests: dict[str, set[str]] = {}
    differing = set()
    for answer in answers:
        for group, (value, differs) in answer.items():
            digests.setdefault(group, set()).add(value)
            if differs:
                differing.add(group)
    differing |= {group for group, values in digests.items() if len(values) > 1}
    return sorted(differing)


class _Held(NamedTuple):
    # A box on a device of this process that has other holders.
    device: jax.Device
    box: boxes.Box
    # The hosts that hold it; empty if each host may have a separate array.
    group: str


@functools.lru_cache(maxsize=2**14)
def _held(sharding: Sharding, shape: tuple[int, ...]) -> tuple[_Held, ...]:
    is_own = sharding.is_fully_addressable and topology.num_hosts() > 1
    local = sharding.addressable_devices
    held = []
    for box, devices in boxes.holders(sharding, shape).items():
        if not box.volume or (len(devices) == 1 and not is_own):
            continue
        hosts = sorted({device.process_index for device in devices})
        group = "" if is_own else ",".join(map(str, hosts))
        held += [_Held(device, box, group) for device in devices if device in local]
    return tuple(held)


@functools.lru_cache(maxsize=2**14)
def _is_in_device_memory(sharding: Sharding) -> bool:
    device = next(iter(sharding.addressable_devices))
    return sharding.memory_kind in (None, device.default_memory().kind)


def _of_host(value: Any, kind: device_digests.Kind) -> device_digests.Looked:
    if isinstance(value, np.ndarray | np.generic):
        values = np.asarray(value)
        if kind == "sample":
            values = device_digests.host_sample(values)
        return device_digests.Looked(digest=digest.values_digest(values).hex())
    content = value.encode() if isinstance(value, str) else value
    content = content if isinstance(content, bytes) else repr(content).encode()
    return device_digests.Looked(
        digest=digest.values_digest(np.frombuffer(content, np.uint8)).hex()
    )
