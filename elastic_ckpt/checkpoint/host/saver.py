"""A host's part in a save: it captures, writes and commits its shards.

A save goes through `capture`, `write`, `commit` (or `abandon`) and `collect`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.host import capture, component_files, trees
from elastic_ckpt.checkpoint.host.answers import CapturedIn, Written, WrittenFile
from elastic_ckpt.checkpoint.host.capture import Value
from elastic_ckpt.checkpoint.host.step_notes import WrittenStep
from elastic_ckpt.checkpoint.host.world import HeldStep, HostWorld
from elastic_ckpt.core import boxes, calls, clock, digest, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import retention
from elastic_ckpt.steps.manifest import Contents, Holder, Leaf, Manifest, Parts
from elastic_ckpt.steps.owners import Holders
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.captured import (
    Captured,
    CapturedSource,
    Part,
    Values,
    fetched,
)
from elastic_ckpt.tiers.choices import PINNED_BYTES
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.peers import secret
from elastic_ckpt.tiers.ram import local, ram_disk


class HostSaver:
    """Saves what one host has.

    Args:
      world: the host among the others.

    Attributes:
      staging: the private directory in which components write.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        tier = world.chosen.local
        self._memory = capture.Memory(
            None if tier is None else world.own.files,
            "auto"
            if world.chosen.persistent is None
            else world.chosen.persistent.capture,
            pinned_bytes=PINNED_BYTES if tier is None else tier.pinned_bytes,
        )
        self.staging = _staging(world)
        self._saving: dict[StepId, _Saving] = {}

    def capture(self, step_id: StepId, of_trees: Mapping[str, Any]) -> CapturedIn:
        """Copies what the devices of this host hold; see `Hosts.capture`.

        Raises:
          CheckpointError: if a leaf cannot be saved.
        """
        return self.begin(step_id, self.captured(trees.arrays(of_trees)))

    def captured(self, values: Mapping[str, Value]) -> Captured:
        """Copies what this host holds of some leaves, by their paths."""
        return capture.capture(values, self._memory)

    def begin(self, step_id: StepId, captured: Captured) -> CapturedIn:
        """Begins to save what was captured of all leaves."""
        storage.make_private_directory(self.staging)
        saving = _Saving(captured=captured, staging=self.staging / str(step_id))
        storage.remove(saving.staging)
        self._saving[step_id] = saving
        if self._world.chosen.local is not None:
            contents = Contents(leaves=captured.leaves)
            try:
                saving.writer = self._world.own.begin(step_id, contents)
            except (errors.CheckpointError, OSError) as error:
                # The other hosts have begun: `write` reports the problem to all.
                saving.problem = str(error)
        notice = self._memory.notice
        return CapturedIn(str(saving.staging), captured.is_lent, notice)

    @calls.call()
    def put(self, step_id: StepId, files: Mapping[str, bytes]) -> None:
        """Writes files of components of a step that is being saved.

        Args:
          step_id: the step.
          files: by path in the step, their content.
        """
        component_files.write(self._saving[step_id].staging, files)

    @calls.call()
    def write(
        self, step_id: StepId, components: tuple[str, ...], problem: str | None
    ) -> Written:
        """Writes the captured values and the files of components.

        Without a local tier their digests are taken, and nothing is written.

        Args:
          step_id: the step.
          components: that have written their files.
          problem: why the step cannot be written, on this driver; None if it can.

        Raises:
          CheckpointError: if it does not fit, or an earlier problem prevents it.
        """
        if problem is not None:
            raise errors.CheckpointError(problem)
        saving = self._saving[step_id]
        files = saving.files = {
            f"{name}/{path}": content
            for name in components
            for path, content in component_files.read(saving.staging / name).items()
        }
        if saving.problem is not None:
            raise errors.CheckpointError(saving.problem)
        writer, captured = saving.writer, saving.captured
        if writer is not None:
            # The search for room takes time for each file: the trainer runs meanwhile.
            num_bytes = captured.num_bytes + sum(map(len, files.values()))
            writer.reserve(num_bytes, taken_bytes=captured.file_bytes)
            writer.write(captured, files)
            saving.parts = dict(writer.parts)
        return self.files(step_id)

    @calls.call()
    def files(self, step_id: StepId) -> Written:
        """Returns the answer of `write`, also for a step that it could not write.

        Raises:
          CheckpointError: if components could not write their files.
        """
        saving = self._saving.get(step_id)
        if saving is None:
            raise errors.CheckpointError(
                f"this host has committed its part of step {step_id.step}, and keeps"
                " no more of it in its own memory"
            )
        if saving.files is None:
            raise errors.CheckpointError("components have not written their files")
        saving.parts = saving.parts or {
            (number, box): digest.values_digest(fetched(values))
            for number, part in enumerate(saving.captured.parts)
            for box, values in part.boxes
        }
        saving.written = tuple(
            WrittenFile(
                path, len(each), digest.values_digest(np.frombuffer(each, np.uint8))
            )
            for path, each in sorted(saving.files.items())
        )
        return Written(
            files=saving.written,
            time_ms=clock.time_ns() // 1_000_000,
            shared=self.digests(step_id, ()),
        )

    @calls.call()
    def hold(self, written: WrittenStep) -> None:
        """Makes a backup read the captured values, until `abandon`."""
        saving = self._saving[written.step_id]
        contents = _contents(saving, written)
        values: dict[Part, Values] = {**saving.captured.values()}
        parts = {**(saving.parts or {})}
        for path, num_bytes, named in saving.written:
            assert saving.files is not None
            box = boxes.whole((num_bytes,))
            parts[contents.files[path], box] = named
            values[path, box] = np.frombuffer(saving.files[path], np.uint8)
        own = self._world.own.host
        saved = Manifest(
            run=self._world.run,
            step_id=written.step_id,
            contents=contents,
            holders=(Holder(own),),
            parts=Parts.of_rows([(*each, parts[each]) for each in parts], contents),
        )
        source = CapturedSource(values, own.id)
        found = FoundStep(StepTable([saved]), [source])
        self._hold(found, self._holders(saving), written, source)

    @calls.call()
    def commit(self, written: WrittenStep) -> None:
        """Commits this host's part of the step."""
        saving = self._saving.pop(written.step_id)
        writer = saving.writer
        assert writer is not None
        holders, contents = self._holders(saving), _contents(saving, written)
        files = {path: named for path, _, named in saving.written}
        saving.release()
        saved = writer.commit(files, contents=contents)
        found = FoundStep(StepTable([saved]), [ram_disk.StepFiles(writer.directory)])
        self._hold(found, holders, written)
        self._add_others(written.step_id)

    def _add_others(self, step_id: StepId) -> None:
        # Where else the parts of a step are, or will be once they are copied: for this
        # host if its own copy of one proves to be bad.
        world, held = self._world, self._world.held[step_id]
        table, holders = held.found.table, held.holders
        placed = world.owners.place(holders, table.num_bytes)
        own = world.number
        hosts = [[each for each in some if each != own][:1] for some in holders]
        for item, target in zip(placed.item.tolist(), placed.target, strict=True):
            hosts[item].append(int(target))
        if any(hosts) and world.passes:
            others = world.listed(table, np.arange(len(table)), hosts)
            found = world.found([table.manifest, others])
            world.held[step_id] = held._replace(found=found)

    def _hold(
        self,
        found: FoundStep,
        holders: Mapping[Part, Holders],
        written: WrittenStep,
        captured: CapturedSource | None = None,
    ) -> None:
        table = found.table
        of_items = [
            written.files[leaf.path].hosts
            if leaf.is_file
            else holders[leaf.path, table.box(item)]
            for item, leaf in ((n, table.leaf(n)) for n in range(len(table)))
        ]
        self._world.held[written.step_id] = HeldStep(found, of_items, captured=captured)

    def _holders(self, saving: _Saving) -> Mapping[Part, Holders]:
        return saving.captured.holders(num_hosts=len(self._world.hosts))

    @calls.call()
    def abandon(self, step_id: StepId) -> None:
        """Removes the files that this host wrote of a step, committed or not."""
        self._world.held.pop(step_id, None)
        saving = self._saving.pop(step_id, None)
        if saving is None:
            self._world.own.remove(step_id)
            return
        saving.release()
        if saving.writer is not None:
            saving.writer.abandon()

    @calls.call()
    def preserved(self) -> tuple[int, ...]:
        """The steps that are preserved by hand on this machine."""
        return tuple(self._world.disk.kept())

    @calls.call()
    def collect(
        self,
        step_id: StepId,
        in_flight: tuple[StepId, ...],
        preserved: tuple[int, ...],
        parents: tuple[StepId, ...],
    ) -> None:
        """Removes steps that are not needed after a step is complete.

        Args:
          step_id: the step.
          in_flight: steps that are, or will be, backed up.
          preserved: steps that are preserved by hand on any machine.
          parents: of the save.
        """
        line = Line(save=step_id.save, parents=parents)
        assert self._world.chosen.local is not None
        policy = self._world.chosen.local.keep or retention.BestN(0)
        held = self._world.own.retained()
        of_line = [each for each in held if not line.abandons(each.step_id)]
        # Of a step that was saved again the newest save counts.
        ascending = sorted(of_line, key=lambda each: each.save)
        newest = {each.step: each.save for each in ascending}
        of_line = [each for each in of_line if each.save == newest[each.step]]
        removed = retention.steps_to_delete(
            of_line,
            policy,
            newest_complete=step_id.step,
            in_flight=[each.step for each in in_flight],
            preserved=preserved,
        )
        gone = [each.step_id for each in of_line if each.step in removed]
        gone += [
            each.step_id
            for each in held
            if each not in of_line
            and each.complete is not None
            and each.step not in preserved
        ]
        for each in gone:
            if each not in in_flight and each not in self._world.own.being_written:
                self._world.own.remove(each)
        kept = {*self._world.own.held(), *in_flight}
        for each in set(self._world.held) - kept:
            del self._world.held[each]
        if self._world.own.slot == 0:
            # No other host does it if the world became smaller.
            kept_steps = {each.step for each in of_line} - set(removed)
            before = min([step_id, *in_flight]).step
            self._world.own.remove_idle(
                lambda each: (
                    each.step not in preserved
                    and (
                        line.abandons(each)
                        or (each.step < before and each.step not in kept_steps)
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

    @calls.call()
    def digests(self, step_id: StepId, under: tuple[str, ...]) -> dict[str, str]:
        """Digests of what other hosts hold too, to be compared with theirs.

        Args:
          step_id: the step, which is written and not committed.
          under: nothing, the numbers of some hosts, or those and a leaf that they hold.

        Returns:
          By hosts, by leaf, or by box.
        """
        saving = self._saving[step_id]
        holders = self._holders(saving)
        leaves = saving.captured.leaves
        rows: dict[str, dict[str, storage.Json]] = {}
        for (number, box), named in (saving.parts or {}).items():
            path = leaves[number].path
            hosts = holders[path, box]
            place = (",".join(map(str, hosts)), path, str(box))
            if len(hosts) > 1 and place[: len(under)] == under:
                of_name = rows.setdefault(place[len(under)], {})
                of_name[" ".join(place)] = named.hex()
        return {name: digest.json_digest(of_name) for name, of_name in rows.items()}


@dataclasses.dataclass(kw_only=True, eq=False)
class _Saving:
    captured: Captured
    # Components write there, each below its name.
    staging: epath.Path
    writer: local.StepWriter | None = None
    problem: str | None = None
    # The files of components by path, after all of them have written: a step that does
    # not fit into RAM is removed, and may still go to storage.
    files: Mapping[str, bytes] | None = None
    written: tuple[WrittenFile, ...] = ()
    # The digests of the arrays, by leaf and box, once they are written.
    parts: Mapping[tuple[int, Box], bytes] | None = None

    def release(self) -> None:
        self.captured.release()
        # Only one step is saved at a time.
        storage.remove(self.staging.parent)


def _contents(saving: _Saving, written: WrittenStep) -> Contents:
    files = sorted(written.files.items())
    return Contents(
        leaves=(
            *saving.captured.leaves,
            *(Leaf.of_file(path, each.num_bytes) for path, each in files),
        ),
        components=tuple(sorted(written.components)),
        **vars(written.notes),
    )


def _staging(world: HostWorld) -> epath.Path:
    # Under one controller the path has to be the same on all hosts, whose RAM disks
    # have the same path; hosts of one machine have different ones, or slots. Others do
    # not know the secret.
    root, slot = world.disk.root, world.own.slot
    known = f"{secret.read(secret.path(root))}.{root}.{slot}"
    name = hashlib.sha256(known.encode()).hexdigest()[:32]
    return epath.Path(tempfile.gettempdir()) / f"elastic_ckpt-staging-{name}"
