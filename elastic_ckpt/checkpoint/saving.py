"""A step on its way through the stages of a save."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

from absl import logging
from etils import epath

from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata, Written
from elastic_ckpt.checkpoint.host.backup import HostBackup
from elastic_ckpt.checkpoint.host.saver import HostSaver
from elastic_ckpt.checkpoint.host.step_notes import (
    FileAtHosts,
    StepNotes,
    WrittenStep,
)
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.structure import StepDescription
from elastic_ckpt.core import clock, errors
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.persistent import claims


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saving:
    """A step that was captured.

    Attributes:
      step_id: the step.
      write_components: has them write their files.
      back_up: whether it goes to persistent storage.
      overwrite: whether other saves of the step are removed from there.
      description: for retention and persistent storage.
      parents: of the save; see `steps.step`.
      path: the directory that it has in persistent storage; None without such a tier.
      began_secs: when it was begun, on the monotonic clock.
      is_last_of_world: whether the run goes on in another world, which makes its
        copies and its backup.
      is_copied_at_once: whether this world makes its copies before it is committed.
      component_kinds: by name, what the components of this host are.
      compare: compares states that should be equal on all hosts.
      optional: the components among those of the step that may be left out, by name.
      stored: set when the step is in persistent storage.
    """

    step_id: StepId
    write_components: Callable[[], None]
    back_up: bool
    overwrite: bool
    description: StepDescription
    parents: Sequence[StepId]
    began_secs: float
    path: epath.Path | None = None
    is_last_of_world: bool = False
    is_copied_at_once: bool = False
    component_kinds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compare: Callable[[], object] = lambda: None
    optional: Mapping[str, Component] = dataclasses.field(default_factory=dict)
    stored: threading.Event = dataclasses.field(default_factory=threading.Event)

    @classmethod
    def from_contents(cls, step_id: StepId, contents: Contents) -> Saving:
        """A step that a world before has saved, on its way to storage.

        Args:
          step_id: the step, which is in RAM.
          contents: of its manifests.
        """
        return cls(
            step_id=step_id,
            # That world has written the files.
            write_components=lambda: None,
            back_up=True,
            overwrite=False,
            description=StepDescription.from_contents(contents),
            parents=contents.parents,
            began_secs=clock.monotonic(),
        )

    @property
    def step(self) -> int:
        """The number of the training step."""
        return self.step_id.step

    @property
    def line(self) -> Line:
        """The line that it is saved to."""
        return Line(save=self.step_id.save, parents=tuple(self.parents))

    def agreed(self, hosts: Hosts) -> tuple[Saving, str | None]:
        """Agrees with the other hosts on what is saved.

        Returns:
          The step with the notes of host 0, because it has one set of notes; and the
          first difference, if hosts save different things.
        """
        kinds = self.description.kinds(self.component_kinds)
        notes = hosts.share("notes", self.description.host_notes(kinds))
        agreed = self.description.agreed(notes[0])
        difference = None
        if len({each.parts_digest for each in notes}) > 1:
            # Of texts, host 0's are saved.
            difference = _difference(hosts.share("parts", kinds))
        return dataclasses.replace(self, description=agreed), difference

    def complete(self, hosts: Hosts) -> tuple[Saving, dict[str, str]]:
        """Leaves out, on all hosts, optional components that one of them cannot save.

        Returns:
          The step without them; and by name, why one was left out.
        """
        why: dict[str, str] = {}
        if not self.optional:
            return self, why
        problems = {n: c.save_problem for n, c in self.optional.items()}
        left_out = {n: p for n, p in problems.items() if p}
        for number, of_host in enumerate(hosts.share("left_out", left_out)):
            for name, problem in of_host.items():
                why.setdefault(name, f"host {number}: {problem}")
        for name in why:
            self.optional[name].save_problem = why[name]
        description = self.description.without(why)
        return dataclasses.replace(self, description=description), why

    def prepare(self) -> tuple[StepNotes | None, str | None]:
        """Writes the files of components.

        Returns:
          The notes of the step; or the problem that all hosts fail the step with.
        """
        # Any error is reported to all hosts, which would wait for this one.
        problem = "components were not written"
        try:
            self.write_components()
            problem = "the step was not described"
            notes = self.description.notes(self.parents)
        except (errors.ElasticCkptError, OSError) as error:
            return None, f"{problem}: {error}"
        except Exception as error:
            logging.exception(problem)
            return None, f"{problem}: {error!r}"
        return dataclasses.replace(notes, is_due=self.back_up), None

    def written(
        self, written: Sequence[Written], notes: StepNotes | None
    ) -> WrittenStep:
        """The step as hosts commit it, or hold it for a backup.

        Args:
          written: by all hosts.
          notes: of the step; there are some if it was written.
        """
        assert notes is not None
        hosts: dict[str, list[int]] = {}
        sizes: dict[str, int] = {}
        for number, each in enumerate(written):
            for path, num_bytes, _ in each.files:
                hosts.setdefault(path, []).append(number)
                sizes[path] = num_bytes
        return WrittenStep(
            step_id=self.step_id,
            components=tuple(self.description.components),
            files={
                path: FileAtHosts(sizes[path], tuple(numbers))
                for path, numbers in hosts.items()
            },
            notes=dataclasses.replace(notes, time_ms=written[0].time_ms),
        )

    def diverged(self, hosts: Hosts, written: Sequence[Written]) -> str | None:
        """The first part that hosts have written with different values.

        Args:
          hosts: of the world.
          written: by all hosts.

        Raises:
          HostsFailedError: if a host cannot tell.
        """
        files = [{f"{f.path}": f.digest.hex() for f in each.files} for each in written]
        part, numbers = _differing(files)
        under: tuple[str, ...] = ()
        # Sets of hosts; then the leaves and boxes of one that differs.
        answers: Sequence[Mapping[str, str]] = [each.shared for each in written]
        while not part:
            name, numbers = _differing(answers)
            if not name:
                return None
            under = (*under, name)
            part = "".join(under[1:]) if under[2:] else ""
            if not part:
                answers = hosts.all(HostSaver.digests, self.step_id, under)
        return (
            f"{part} has different values at the hosts"
            f" {', '.join(map(str, numbers))}: a device or memory of one of them is"
            " faulty, or hosts computed different values; the step is not saved"
        )

    def upload(
        self, hosts: Hosts, check_writer: Callable[[], claims.Claim | None]
    ) -> tuple[int, list[str]]:
        """Uploads a committed or held step from all hosts, and commits it to storage.

        Args:
          hosts: of the world.
          check_writer: returns the claim of this world; called before storage is
            written to, and before the commit.

        Returns:
          The bytes, and the copies that proved to be bad, a sentence each.

        Raises:
          HostsFailedError: if it is not committed.
          ReplacedError: if another program writes.
        """
        claim = check_writer()
        assert claim is not None
        step_id, description = self.step_id, self.description
        chunks = hosts.first(HostBackup.begin, step_id, claim)
        answers = hosts.all(HostBackup.back_up, step_id)
        files = description.files(chunks)
        check_writer()
        hosts.first(HostBackup.commit, step_id, files, claim)
        bad = dict.fromkeys(why for each in answers for why in each.bad)
        return sum(each.num_bytes for each in answers), list(bad)

    def committed(self, time_ms: int) -> CheckpointMetadata:
        """The step once it is committed.

        Args:
          time_ms: when that was, since the epoch.
        """
        return CheckpointMetadata(
            step=self.step_id.step,
            save=self.step_id.save,
            line=self.step_id.after(self.parents),
            path=self.path,
            metrics=self.description.metrics,
            custom_metadata=self.description.custom_metadata,
            commit_timestamp_nsecs=1_000_000 * time_ms,
        )


def _differing(of_hosts: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
    # The first name for which hosts have different texts, and these hosts.
    texts: dict[str, dict[str, list[int]]] = {}
    for number, of_host in enumerate(of_hosts):
        for name, text in of_host.items():
            texts.setdefault(name, {}).setdefault(text, []).append(number)
    for name, holders in sorted(texts.items()):
        if len(holders) > 1:
            return name, sorted(n for numbers in holders.values() for n in numbers)
    return "", []


def _difference(of_hosts: Sequence[Mapping[str, str]]) -> str:
    # The first part that hosts save differently, and what each of them has there.
    for path in sorted(set().union(*of_hosts)):
        hosts: dict[str, list[int]] = {}
        for number, kinds in enumerate(of_hosts):
            hosts.setdefault(kinds.get(path, "nothing"), []).append(number)
        if len(hosts) > 1:
            each = "; ".join(
                f"host{'s' * (len(numbers) > 1)} {errors.first_of(map(str, numbers))}:"
                f" {kind}"
                for kind, numbers in hosts.items()
            )
            return (
                f"hosts save different things as {path!r} ({each}); give the same"
                " checkpointables on every host"
            )
    return "hosts save different things; give the same checkpointables on every host"
