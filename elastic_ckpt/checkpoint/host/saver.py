"""One host's side of a save: it captures, writes and commits its parts.

A save calls `capture`, `write`, `commit` (or `abandon`) and then `collect`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.host import capture, component_files
from elastic_ckpt.checkpoint.host.capture import Value
from elastic_ckpt.checkpoint.host.world import HeldStep, HostWorld
from elastic_ckpt.core import boxes, calls, clock, digest, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import retention
from elastic_ckpt.steps.manifest import Contents, Holder, Manifest, Parts
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.captured import (
    Captured,
    CapturedSource,
    PartKey,
    Values,
    fetched,
)
from elastic_ckpt.tiers.choices import PINNED_BYTES
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.ram import local, ram_disk

# A step stays in RAM until all copies of the next step are made.
_STEPS = 2


class CapturedIn(NamedTuple):
    """A step that was captured on a host.

    Attributes:
      directory: the directory in which each component has a subdirectory for its files.
      is_lent: whether values stay in the caller's arrays until the step is committed.
      notice: why training waits for captures; empty if it does not wait, or if the
        reason was already reported.
    """

    directory: str
    is_lent: bool = False
    notice: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """A step that a host has written but not yet committed.

    Attributes:
      files: the sizes of the files that components wrote on this host, by path.
      time_ms: when the step was written, in milliseconds since 1970.
      shared: a digest of each file, keyed by path, and a digest of all parts that a set
        of hosts holds, keyed by the host indices.
      preserved: the steps that are pinned or being read on this machine.
      problem: why the step is not in this host's RAM; empty if it is, or need not be.
      needs_bytes: for the first save to RAM, the bytes that this host's arrays and
        their copies take on each machine.
      room_bytes: for the first save to RAM, the bytes that the run may use on this
        machine, including bytes already in use.
    """

    files: Mapping[str, int]
    time_ms: int
    shared: Mapping[str, str]
    preserved: tuple[int, ...]
    problem: str
    machine: str = ""
    needs_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    room_bytes: int = 0


def lacking_room(written: Sequence[Written]) -> dict[int, str]:
    """By host index, why steps and their copies do not fit into the host's RAM."""
    needs: collections.Counter[str] = collections.Counter()
    for each in written:
        needs.update(each.needs_bytes)
    return {
        number: f"{_STEPS} steps with copies of other hosts' parts need"
        f" {_STEPS * needs[each.machine]} bytes of RAM on its machine, where this run"
        f" can use {each.room_bytes}; raise the limit, enlarge the file system, or"
        " reduce the number of copies"
        for number, each in enumerate(written)
        if _STEPS * needs[each.machine] > each.room_bytes
    }


class HostSaver:
    """Saves one host's parts of each step.

    Attributes:
      staging: the directory to which components write. With a single controller, it
        must be the same on all machines.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        local, persistent = world.chosen.local, world.chosen.persistent
        self._memory = capture.Memory(
            None if local is None else world.own.files,
            "auto" if persistent is None else persistent.capture,
            pinned_bytes=PINNED_BYTES if local is None else local.pinned_bytes,
        )
        slot = world.disk.host_directory(world.own.slot)
        self.staging = slot / ram_disk.STAGED
        self._saving: dict[StepId, _HostSave] = {}
        # The sizes of the last-saved values.
        self._sizes: list[int] = []

    def captured(self, values: Mapping[str, Value]) -> Captured:
        """Copies this host's shards of each leaf; `values` maps paths to leaves.

        Raises:
          CheckpointError: if a leaf cannot be saved.
        """
        return capture.capture(values, self._memory)

    def begin(self, step_id: StepId, captured: Captured) -> CapturedIn:
        """Begins to save the captured values of all leaves."""
        saving = _HostSave(captured=captured, staging=self.staging / str(step_id))
        storage.remove(saving.staging)
        self._saving[step_id] = saving
        return CapturedIn(str(saving.staging), captured.is_lent, self._memory.notice)

    @calls.call()
    def put(self, step_id: StepId, files: Mapping[str, bytes]) -> None:
        """Writes component files; `files` maps paths in the new step to contents."""
        component_files.write(self._saving[step_id].staging, files)

    @calls.call()
    def write(
        self, step_id: StepId, components: tuple[str, ...], problem: str | None
    ) -> Written:
        """Writes the captured values and the component files.

        If there is no local tier, only computes their digests.

        Raises:
          CheckpointError: if `problem` is not None.
        """
        if problem is not None:
            raise errors.CheckpointError(problem)
        saving = self._saving[step_id]
        saving.files = files = {
            f"{name}/{path}": content
            for name in components
            for path, content in component_files.read(saving.staging / name).items()
        }
        # The files no longer take room beside the step.
        storage.remove(saving.staging)
        captured, own, problem = saving.captured, self._world.own, ""
        named: Mapping[tuple[int, Box], bytes] = {}
        needs_bytes: Mapping[str, int] = {}
        if self._world.chosen.local is not None:
            num_bytes = captured.num_bytes + sum(map(len, files.values()))
            try:
                self._world.disk.put_back()
                writer = own.begin(step_id, Contents(leaves=captured.leaves))
                saving.writer = writer
                writer.reserve(num_bytes, taken_bytes=captured.file_bytes)
                writer.write(captured, files)
                named = writer.parts
                needs_bytes = {} if self._sizes else self._needs_bytes(captured)
            except (errors.CheckpointError, OSError) as error:
                problem = str(error)
        paths = [leaf.path for leaf in captured.leaves]
        known = {(paths[number], box): named[number, box] for number, box in named}
        saving.parts = {
            part: known.get(part) or digest.values_digest(fetched(values))
            for part, values in saving.values().items()
        }
        return Written(
            files={path: len(content) for path, content in files.items()},
            time_ms=clock.time_ns() // 1_000_000,
            shared={
                name: digest.json_digest({**parts})
                for name, parts in self._shared(saving).items()
            },
            preserved=tuple(self._world.disk.kept()),
            problem=problem,
            machine=own.host.machine,
            needs_bytes=needs_bytes,
            room_bytes=own.disk.room_bytes() if needs_bytes else 0,
        )

    def _needs_bytes(self, captured: Captured) -> dict[str, int]:
        # See `Written.needs_bytes`.
        world, values = self._world, captured.values().values()
        sizes = np.array([each.nbytes for each in values], np.int64)
        holders = captured.holders(num_hosts=len(world.hosts))
        plan = world.owners.plan_copies([*holders.values()], sizes)
        needs = collections.Counter({world.own.host.machine: captured.num_bytes})
        sent = plan.source == world.number
        for target, item in zip(plan.target[sent], plan.item[sent], strict=True):
            needs[world.hosts[target].machine] += int(sizes[item])
        return needs

    @calls.call()
    def digests(self, step_id: StepId, shared: str) -> dict[str, str]:
        """The digests, by part name, that a digest in `Written.shared` covers."""
        return self._shared(self._saving[step_id]).get(shared, {})

    def _shared(self, saving: _HostSave) -> dict[str, dict[str, str]]:
        # Digests of parts that other hosts also hold or may have written, keyed by host
        # set or file path, then by part name.
        holders = saving.captured.holders(num_hosts=len(self._world.hosts))
        shared: dict[str, dict[str, str]] = {}
        for (path, box), named in saving.parts.items():
            hosts = holders.get((path, box), ())
            if not hosts:
                shared[path] = {path: named.hex()}
            elif len(hosts) > 1:
                of_hosts = shared.setdefault(",".join(map(str, hosts)), {})
                of_hosts[f"{path}{box}"] = named.hex()
        return shared

    @calls.call()
    def commit(
        self,
        step_id: StepId,
        contents: Contents,
        files: Mapping[str, tuple[int, ...]],
        in_ram: bool,
    ) -> None:
        """Commits this host's parts of the step.

        Args:
          step_id: the step.
          contents: the step's contents, without the arrays.
          files: the indices of the hosts that have written each component file, by
            path.
          in_ram: whether to commit to RAM; if not, a backup reads the captured values
            until `abandon`.
        """
        world, saving = self._world, self._saving[step_id]
        holders = saving.captured.holders(num_hosts=len(world.hosts))
        for leaf in contents.leaves:
            holders[leaf.path, boxes.whole(leaf.shape)] = files[leaf.path]
        leaves = (*saving.captured.leaves, *contents.leaves)
        contents = dataclasses.replace(contents, leaves=leaves)
        numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
        named = saving.parts.items()
        parts = {(numbers[path], box): each for (path, box), each in named}
        if in_ram:
            writer = saving.writer
            assert writer is not None
            del self._saving[step_id]
            self._sizes = [
                values.nbytes for values in saving.captured.values().values()
            ]
            saving.release()
            writer.parts |= parts
            saved = writer.commit(contents)
            source = ram_disk.StepFiles(writer.directory)
        else:
            rows = [(*part, named) for part, named in parts.items()]
            saved = Manifest(
                run=world.run,
                step_id=step_id,
                contents=contents,
                holders=(Holder(world.own.host),),
                parts=Parts.of_rows(rows, contents),
            )
            memory = f"memory of host {world.own.host.id}"
            source = CapturedSource(memory, saving.values())
        table = StepTable([saved])
        world.held[step_id] = HeldStep(
            FoundStep(table, [source]),
            [holders[table.leaf(n).path, table.box(n)] for n in range(len(table))],
        )
        if in_ram:
            self._add_others(step_id)

    def _add_others(self, step_id: StepId) -> None:
        # Adds the other places where the step's parts are, or will be once copied, in
        # case this host's own copy turns out to be bad.
        world, held = self._world, self._world.held[step_id]
        table, holders = held.found.table, held.holders
        plan = world.owners.plan_copies(holders, table.num_bytes)
        hosts = [[n for n in some if n != world.number][:1] for some in holders]
        for item, target in zip(plan.item.tolist(), plan.target, strict=True):
            hosts[item].append(int(target))
        if any(hosts) and world.passes:
            others = world.listed(table, np.arange(len(table)), hosts)
            found = world.found([table.manifest, others])
            world.held[step_id] = held._replace(found=found)

    @calls.call()
    def abandon(self, step_id: StepId) -> None:
        """Removes this host's files of a step, committed or not."""
        self._world.held.pop(step_id, None)
        saving = self._saving.pop(step_id, None)
        if saving is None:
            self._world.own.remove(step_id)
        else:
            saving.release()
            if saving.writer is not None:
                saving.writer.abandon()

    @calls.call()
    def collect(
        self,
        step_id: StepId,
        in_flight: tuple[StepId, ...],
        preserved: tuple[int, ...],
        parents: tuple[StepId, ...],
    ) -> None:
        """Removes steps that are no longer needed once a step is complete.

        Args:
          step_id: the step.
          in_flight: steps that are being backed up or will be.
          preserved: steps that are pinned or being read on any machine.
          parents: the parents of the save.
        """
        world, own = self._world, self._world.own
        assert world.chosen.local is not None
        line, held = Line(save=step_id.save, parents=parents), own.retained()
        of_line = [each for each in held if not line.abandons(each.step_id)]
        # If a step was saved again, only the newest save matters.
        of_line.sort(key=lambda each: each.save)
        newest = {each.step: each for each in of_line}
        removed = retention.steps_to_delete(
            [*newest.values()],
            world.chosen.local.keep or retention.BestN(0),
            newest_complete=step_id.step,
            in_flight=[each.step for each in in_flight],
            preserved=preserved,
        )
        unknown = [each.step_id for each in held if each.complete is None]
        kept = {*in_flight, *own.being_written, *unknown}
        kept |= {each.step_id for n, each in newest.items() if n not in removed}
        for each in held:
            if each.step_id not in kept and each.step not in preserved:
                own.remove(each.step_id)
        # Evaluated in this order, so that a step that is being committed stays.
        for gone in {*world.held}.difference(own.held(), in_flight, self._saving):
            del world.held[gone]
        own.prepare(self._sizes)
        if own.slot == 0:
            # If the world shrank, no host owns these slots.
            before = min([step_id, *in_flight]).step
            steps = {each.step for each in kept}
            own.remove_idle(
                lambda each: (
                    each.step not in preserved
                    and (
                        line.abandons(each)
                        or (each.step < before and each.step not in steps)
                    )
                )
            )

    @calls.call()
    def remove(self, step: int) -> bool:
        """Removes all saves of a step; returns whether there were any."""
        own = self._world.own
        saves = [each for each in own.held() if each.step == step]
        for each in saves:
            own.remove(each)
        was_idle = own.slot == 0 and own.remove_idle(lambda each: each.step == step)
        return bool(saves) or was_idle


@dataclasses.dataclass(kw_only=True, eq=False)
class _HostSave:
    captured: Captured
    # Has a subdirectory for each component's files.
    staging: epath.Path
    writer: local.StepWriter | None = None
    # Once written: the component files by path, and the digests of all parts.
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    parts: Mapping[PartKey, bytes] = dataclasses.field(default_factory=dict)

    def values(self) -> dict[PartKey, Values]:
        # All parts, which are boxes of arrays and files.
        return {
            **self.captured.values(),
            **{
                (path, boxes.whole((len(content),))): np.frombuffer(content, np.uint8)
                for path, content in self.files.items()
            },
        }

    def release(self) -> None:
        self.captured.release()
        # Only one step is saved at a time.
        storage.remove(self.staging.parent)
