"""The shards that one host holds of the head's arrays, in saves and restores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.checkpoint.host.capture import Shards
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.core import boxes, calls
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.captured import Captured
from elastic_ckpt_sidecar.array_layout import Group, GroupDescription, PlacedLeaf


class HostArrays:
    """The arrays of one host, for the calls of saves and restores.

    A save goes through `hold` for each group, and `capture`; a restore through
    `select`, and `read` and `made` for each group. So one group at a time is in the
    memory of the CPU devices.

    Args:
      saver: of the host.
      reader: of the host.
      own: the ids of its CPU devices.
      devices: all CPU devices of the world, by id.
    """

    def __init__(
        self,
        saver: HostSaver,
        reader: HostReader,
        *,
        own: Collection[int],
        devices: Mapping[int, jax.Device],
    ) -> None:
        self._saver = saver
        self._reader = reader
        self._own = frozenset(own)
        self._devices = devices
        self._layouts: dict[int, list[Group]] = {}
        self._boxes: dict[int, dict[str, dict[boxes.Box, int]]] = {}
        # Made by the first save that a RAM disk does not hold.
        self._holders: dict[tuple[int, str], dict[boxes.Box, tuple[int, str]]] = {}
        # By layout and group, until the last one is there.
        self._captured: dict[tuple[int, int], Captured] = {}
        self._dtypes: dict[str, str] = {}

    @calls.call()
    def describe(self, layout: int, groups: tuple[GroupDescription, ...]) -> None:
        """Receives a layout, which later calls name by its number."""
        known = [each.group(self._devices) for each in groups]
        self._boxes[layout] = {
            leaf.path: self._boxes_of(group, leaf)
            for group in known
            for leaf in group.leaves
        }
        self._layouts[layout] = known

    def hold(
        self, layout: int, group: int, arrays: Sequence[jax.Array], *, kept: bool
    ) -> None:
        """Copies this host's shards of a group's arrays.

        Args:
          layout: its number.
          group: its number in the layout.
          arrays: of its leaves.
          kept: whether no other code changes them, so that they need no copy in memory.
        """
        members = self._layouts[layout][group]
        shards = {}
        for leaf, array in zip(members.leaves, arrays, strict=True):
            held = {shard.device.id: shard.data for shard in array.addressable_shards}
            shards[leaf.path] = self._shards(layout, members, leaf, held, kept=kept)
        captured = self._saver.captured(shards)
        # A save that failed may have left one.
        self._release(self._captured.pop((layout, group), None))
        self._captured[layout, group] = captured

    @calls.call()
    def capture(self, step_id: StepId, layout: int) -> str:
        """Begins to save what was held; see `Hosts.capture`."""
        groups = self._layouts[layout]
        held, self._captured = self._captured, {}
        # This host knows of what is on others alone, too.
        elsewhere = {
            leaf.path: self._shards(layout, group, leaf, None, kept=True)
            for number, group in enumerate(groups)
            if (layout, number) not in held
            for leaf in group.leaves
        }
        for key in [key for key in held if key[0] != layout]:
            self._release(held.pop(key))
        several = [*held.values(), self._saver.captured(elsewhere)]
        captured = Captured.joined(several)
        return self._saver.begin(step_id, captured).directory

    def _release(self, captured: Captured | None) -> None:
        if captured is not None:
            captured.release()

    @calls.call()
    def select(self, layout: int, components: tuple[str, ...]) -> None:
        """Selects this host's boxes of a layout, to be read from the open step.

        Args:
          layout: its number.
          components: that are wanted besides.

        Raises:
          CheckpointError: if the step does not have one of them.
        """
        leaves = [leaf for group in self._layouts[layout] for leaf in group.leaves]
        saved = self._reader.select(
            [_wanted(leaf, self._boxes[layout][leaf.path]) for leaf in leaves],
            components,
        )
        self._dtypes = {
            leaf.path: saved[leaf.path] for leaf in leaves if leaf.dtype is None
        }

    @calls.call(limit_secs=calls.LONG_SECS)
    def read(self, layout: int, group: int) -> dict[str, int]:
        """Reads and verifies this host's boxes of a group; see `HostReader.read`."""
        leaves = self._layouts[layout][group].leaves
        return self._reader.read_some({leaf.path for leaf in leaves})

    @calls.call()
    def dtypes(self) -> dict[str, str]:
        """Returns the saved dtypes of the leaves that are requested in any dtype."""
        return self._dtypes

    def abstract(self, layout: int, group: int) -> list[jax.ShapeDtypeStruct]:
        """Returns the abstract arrays of a requested group."""
        members = self._layouts[layout][group]
        return [members.abstract(leaf, self._dtypes) for leaf in members.leaves]

    def made(self, layout: int, group: int) -> list[list[jax.Array]]:
        """Makes each leaf's arrays of the values read, on this host's devices."""
        members = self._layouts[layout][group]
        values = self._reader.made({leaf.path for leaf in members.leaves})
        return [
            self._on_devices(members, leaf, values[leaf.path])
            for leaf in members.leaves
        ]

    def _boxes_of(self, group: Group, leaf: PlacedLeaf) -> dict[boxes.Box, int]:
        # Each local box that has elements, and the first device with it.
        first: dict[boxes.Box, int] = {}
        for device, box in self._device_boxes(group, leaf):
            if box.volume:
                first.setdefault(box, device.id)
        return first

    def _device_boxes(
        self, group: Group, leaf: PlacedLeaf
    ) -> list[tuple[jax.Device, boxes.Box]]:
        here = group.sharding(leaf).addressable_devices_indices_map(leaf.shape)
        return [
            (device, boxes.of_index(index or (), leaf.shape))
            for device, index in here.items()
            if device.id in self._own
        ]

    def _shards(
        self,
        layout: int,
        group: Group,
        leaf: PlacedLeaf,
        held: Mapping[int, jax.Array] | None,
        *,
        kept: bool,
    ) -> Shards:
        # Of the arrays by device; without values if there are none.
        assert leaf.dtype is not None
        dtype = np.dtype(leaf.dtype)
        listed = []
        needed = self._boxes[layout][leaf.path] if held is not None else {}
        for box, device in needed.items():
            values = np.asarray((held or {})[device])
            if leaf.spec is None:
                values = values.view(dtype).reshape(leaf.shape)
            listed.append((box, values))
        return Shards(
            leaf=Leaf(path=leaf.path, shape=leaf.shape, dtype=leaf.dtype),
            shard_shape=group.sharding(leaf).shard_shape(leaf.shape),
            boxes=tuple(listed),
            kept=kept,
            is_own=lambda box: (
                self._holders_of(layout, group, leaf, box)[0] in self._own
            ),
            group_of=lambda box: self._holders_of(layout, group, leaf, box)[1],
        )

    def _holders_of(
        self, layout: int, group: Group, leaf: PlacedLeaf, box: boxes.Box
    ) -> tuple[int, str]:
        # The device whose host uploads a box, and the name of the devices that hold it.
        key = (layout, leaf.path)
        if key not in self._holders:
            devices_of = boxes.holders(group.sharding(leaf), leaf.shape)
            self._holders[key] = {
                held: (devices[number % len(devices)].id, _named(devices))
                for number, (held, devices) in enumerate(devices_of.items())
            }
        return self._holders[key][box]

    def _on_devices(
        self, group: Group, leaf: PlacedLeaf, values: Mapping[boxes.Box, np.ndarray]
    ) -> list[jax.Array]:
        made = []
        for device, box in self._device_boxes(group, leaf):
            # No values were read for a box without elements.
            part = values.get(box, np.empty(box.shape, leaf.dtype))
            if leaf.spec is None:
                part = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
            made.append(_put(part, device))
        return made


def _named(devices: Sequence[jax.Device]) -> str:
    ids = sorted(device.id for device in devices)
    return ",".join(map(str, ids)) if ids[1:] else ""


def _wanted(leaf: PlacedLeaf, needed: Mapping[boxes.Box, int]) -> trees.WantedLeaf:
    def place(number: int, values: np.ndarray) -> np.ndarray:
        del number
        return values.astype(leaf.dtype or values.dtype, copy=False)

    return trees.WantedLeaf(
        path=leaf.path,
        shape=leaf.shape,
        boxes=tuple(needed),
        place=place,
        join=lambda placed: dict(zip(needed, placed, strict=True)),
    )


def _put(values: np.ndarray, device: jax.Device) -> jax.Array:
    # In their dtype, whatever this process computes in.
    with jax.enable_x64(True):
        return jax.device_put(values, device)
