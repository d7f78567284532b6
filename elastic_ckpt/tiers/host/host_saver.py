"""A host's part in a save: what its devices hold, written, committed, and copied.

A save goes through `capture`, `write`, `commit` (or `abandon`), `replicate`, `collect`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors, host_memory
from elastic_ckpt.tiers import capture, placement, retention, trees, verified_read
from elastic_ckpt.tiers.holdings import Holdings, Offer
from elastic_ckpt.tiers.host import replication
from elastic_ckpt.tiers.host.host_world import Answer, HostWorld
from elastic_ckpt.tiers.line import Line
from elastic_ckpt.tiers.manifest import ComponentFile, Contents, Host
from elastic_ckpt.tiers.ram import step_writer
from elastic_ckpt.tiers.source import Source


class HostSaver:
    """Saves what one host has.

    Args:
      world: the host among the others.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        self._pool = host_memory.Pool()
        self._saving: dict[tuple[int, str], _Saving] = {}

    def capture(self, step: int, save: str, of_trees: Mapping[str, Any]) -> str:
        """Copies what the devices of this host hold; see `Hosts.capture`.

        Raises:
          CheckpointError: if a leaf cannot be saved.
        """
        captured = capture.capture(trees.leaves(of_trees), self._pool)
        saving = _Saving(captured=captured)
        self._saving[step, save] = saving
        contents = Contents(leaves=captured.leaves, components={})
        try:
            saving.writer = self._world.own.begin(step, save, contents, num_bytes=None)
        except (errors.CheckpointError, OSError) as error:
            # The others have begun: `write` says it to all.
            saving.problem = str(error)
        return str(self._world.disk.step_directory(self._world.own.slot, step, save))

    def write(
        self, step: int, save: str, components: Sequence[str], problem: str | None
    ) -> Answer:
        """Writes what was captured; says what `files` components wrote, and `time_ms`.

        Raises:
          CheckpointError: if it does not fit, or `problem` says what went wrong.
        """
        saving = self._saving[step, save]
        problem = saving.problem or problem
        if problem is not None:
            raise errors.CheckpointError(problem)
        assert saving.writer is not None
        # To look for room takes as long as there are files: the trainer goes on.
        self._world.own.reserve(saving.writer, saving.captured.num_bytes)
        saving.writer.write(saving.captured)
        saving.captured.release()
        saving.written = saving.writer.component_files(components)
        names: dict[str, list[str]] = {component: [] for component in components}
        for file in saving.written:
            component, _, name = file.path.partition("/")
            names[component].append(name)
        return {"files": names, "time_ms": time.time_ns() // 1_000_000}

    def commit(
        self,
        step: int,
        save: str,
        parts: Mapping[str, Mapping[str, int]],
        time_ms: int,
        metrics: str | None,
        parents: Sequence[Sequence[Any]] = (),
    ) -> None:
        """Makes this host's part exist.

        Args:
          step: the training step.
          save: which save of it.
          parts: by component and file, the number of the part that a file is.
          time_ms: when that is, for all hosts; see `Contents`.
          metrics: see `Contents`.
          parents: see `Contents`.
        """
        saving = self._saving.pop((step, save))
        assert saving.writer is not None
        files = []
        for file in saving.written:
            component, _, name = file.path.partition("/")
            part = parts[component][name]
            files.append(
                ComponentFile(
                    component=component,
                    parts=(part, part + 1),
                    path=file.path,
                    digest=file.digest,
                    stored_bytes=file.stored_bytes,
                )
            )
        contents = dataclasses.replace(
            saving.writer.manifest.contents,
            components={component: len(of) for component, of in parts.items()},
            time_ms=time_ms,
            metrics=metrics,
            parents=tuple((number, name) for number, name in parents),
        )
        saving.writer.commit(files, contents=contents)

    def abandon(self, step: int, save: str) -> None:
        """Takes back what this host wrote of a step, committed or not."""
        saving = self._saving.pop((step, save), None)
        if saving is None:
            self._world.own.remove(step, save)
            return
        saving.captured.release()
        if saving.writer is not None:
            saving.writer.abandon()
        else:
            # Components began to write, whether or not there is room.
            self._world.own.remove(step, save)

    def replicate(self, step: int, save: str) -> Answer:
        """Takes the copies that placement gives this host, and compares replicas.

        Returns:
          `copies` and their `bytes`, `problems`, what `diverged`, by name, whether
          copies `failed` to be made that could have been, and the steps that somebody
          `preserved` by hand on this machine.

        Raises:
          CheckpointError: if nothing of the step can be read, or copies do not fit.
        """
        sources, problems = self._world.in_ram(step, save)
        failed = bool(problems)
        holdings = Holdings.of(list(sources))
        diverged = [_diverged(holdings, int(item)) for item in holdings.diverged]
        place = (
            placement.assume_data_parallelism
            if self._world.peers.assume_data_parallelism
            else placement.place
        )
        policy = placement.Policy(
            copies=self._world.peers.copies if len(self._world.hosts) > 1 else 0,
            domain=self._world.peers.domain,
        )
        placed = place(holdings, self._world.hosts, policy)
        problems += diverged
        problems += [
            each.why for each in placed.shortfalls if each.lacks != "agreement"
        ]
        items = replication.incoming(placed, self._world.own.host)
        taken = replication.Taken(copies=0, num_bytes=0, problems=())
        if items:
            taken = self._take(holdings, items, sources)
        return {
            "copies": taken.copies,
            "bytes": taken.num_bytes,
            "problems": [*problems, *taken.problems],
            "diverged": diverged,
            "preserved": self._world.disk.preserved(),
            "failed": failed or bool(taken.problems),
        }

    def collect(
        self,
        step: int,
        save: str,
        in_flight: Sequence[int],
        preserved: Sequence[int],
        parents: Sequence[Sequence[Any]] = (),
    ) -> list[tuple[int, str]]:
        """Removes what is not needed now that a step is complete; what was removed.

        Args:
          step: that is complete.
          save: which save of it; others go.
          in_flight: steps that are, or will be, backed up.
          preserved: steps that are preserved by hand on any machine.
          parents: of the save.
        """
        line = Line(save=save, parents=tuple((n, name) for n, name in parents))
        policy = self._world.local_tier.keep or retention.NewestOnly()
        held = self._world.own.retained()
        abandoned = [each for each in held if line.abandons(each.step, each.save)]
        of_line = [each for each in held if each not in abandoned]
        removed = retention.steps_to_delete(
            of_line,
            policy,
            newest_complete=step,
            in_flight=in_flight,
            preserved=preserved,
        )
        gone = [
            (each.step, each.save)
            for each in of_line
            if each.step in removed
            or (each.step == step and each.save < save and step not in preserved)
        ]
        gone += [
            (each.step, each.save)
            for each in retention.abandoned_to_delete(
                abandoned, of_line, policy, preserved=preserved
            )
        ]
        for each in gone:
            if each not in self._world.own.in_flight:
                self._world.own.remove(*each)
        if self._world.own.slot == 0:
            # Nobody else does it where the world became smaller.
            oldest = min([step, *in_flight])
            self._world.own.remove_idle(line, before=oldest, preserved=preserved)
        return gone

    def remove(self, step: int) -> bool:
        """Removes all saves of a step; whether there were any."""
        found = [each for each in self._world.own.held() if each.step == step]
        for each in found:
            self._world.own.remove(each.step, each.save)
        return bool(found)

    def _take(
        self,
        holdings: Holdings,
        items: Sequence[tuple[int, Host]],
        sources: Mapping[Offer, Source],
    ) -> replication.Taken:
        manifest = holdings.offers[0].manifest
        size = int(sum(holdings.stored_bytes[item] for item, _ in items))
        writer = self._world.own.copy_writer(
            manifest.step, manifest.save, manifest.contents, num_bytes=size
        )

        def keep(copy: replication.ChunkCopy | replication.FileCopy) -> None:
            if isinstance(copy, replication.FileCopy):
                writer.put_file(copy.file, copy.content)
            else:
                writer.put(copy.fragment, copy.values)

        reader = verified_read.VerifiedReader(sources)
        taken = replication.take(holdings, items, reader, keep)
        writer.commit()
        return taken


@dataclasses.dataclass(kw_only=True, eq=False)
class _Saving:
    captured: capture.Captured
    writer: step_writer.StepWriter | None = None
    problem: str | None = None
    written: Sequence[step_writer.WrittenFile] = ()


def _diverged(holdings: Holdings, item: int) -> str:
    # In one order, for each host tells it.
    hosts = ", ".join(sorted(offer.host.id for offer in holdings.holders(item)))
    return (
        f"{holdings.name(item)} has different values at the hosts {hosts}: a device or"
        " memory of one of them is faulty, and the step does not count as complete"
    )
