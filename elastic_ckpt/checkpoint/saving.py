"""A step on its way through the stages of a save."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging
from etils import epath

from elastic_ckpt.checkpoint.components import validation
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.checkpoint.host.saver import HostSaver, Written
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.structure import StepDescription
from elastic_ckpt.core import errors, events, topology
from elastic_ckpt.steps.manifest import Contents, Leaf
from elastic_ckpt.steps.step import Line, StepId


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedStep:
    """A captured step.

    Attributes:
      step_id: the step number and the name of the save.
      description: the step's description, for retention and persistent storage.
      began_secs: the time on the monotonic clock at which the save began.
      back_up: whether the step goes to persistent storage.
      overwrite: whether the save replaces other saves of the step there.
      write_components: a function that makes the components write their files.
      path: the step directory in persistent storage; None if there is no such tier.
      is_last_of_world: whether the run continues in another world, which makes the
        step's copies and backup.
      is_copied_at_once: whether the save is done only after its copies have been made.
      stateful: the step's components, keyed by name; empty if an earlier world saved
        the step.
      stored: an event that is set when the step is in persistent storage.
    """

    step_id: StepId
    description: StepDescription
    began_secs: float
    back_up: bool = True
    overwrite: bool = False
    write_components: Callable[[], None] = lambda: None
    path: epath.Path | None = None
    is_last_of_world: bool = False
    is_copied_at_once: bool = False
    stateful: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stored: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def step(self) -> int:
        """The number of the training step."""
        return self.step_id.step

    @property
    def line(self) -> Line:
        """The line that the step is saved to."""
        return Line(save=self.step_id.save, parents=self.description.contents.parents)

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds of values to save, keyed by leaf path or component name."""
        kinds = {
            name: str(each) if isinstance(each, Component) else "component"
            for name, each in self.stateful.items()
        }
        return self.description.kinds(kinds)

    def difference(self, hosts: Hosts, kinds_digests: Sequence[str]) -> str | None:
        """Describes the first leaf or component that hosts save differently, if any."""
        if len(set(kinds_digests)) == 1:
            return None
        path, kinds = _differing(hosts.gather("parts", self.kinds), missing="nothing")
        each = "; ".join(
            f"host{'s' * (len(numbers) > 1)} {errors.first_of(map(str, numbers))}:"
            f" {kind}"
            for kind, numbers in kinds.items()
        )
        return (
            f"the hosts save different kinds of values as {path!r} ({each}); pass the"
            " same checkpointables on every host"
        )

    def compare_components(self, emit: events.Emit) -> None:
        """Compares the captured states of replicated components, and reports findings.

        Host 0 writes their states for all hosts, so a host with a different state would
        silently lose it. All hosts must call this.

        Raises:
          RunError: if a host does not answer in time.
        """
        compared = {
            name: each
            for name, each in self.stateful.items()
            if isinstance(each, Component) and each.is_compared
        }
        if not compared:
            return
        level = max(
            (each.validation for each in compared.values()), key=validation.LEVELS.index
        )
        # The placeholder of a state that a host could not capture; its save fails
        # anyway.
        lacking = {"problem": "its state could not be captured"}
        states = {
            name: lacking if each.taken is None else each.taken
            for name, each in compared.items()
        }
        for component in compared.values():
            component.taken = None
        findings = validation.compared(
            states, level=level, kind="replicated components"
        )
        if topology.is_primary():
            validation.report(self.step, findings, emit=emit)

    def complete(self, hosts: Hosts) -> tuple[CapturedStep, dict[str, str]]:
        """Omits, on all hosts, optional components that any of the hosts cannot save.

        Returns:
          The step without those components, and the reasons, keyed by component name.
        """
        why: dict[str, str] = {}
        optional = {
            name: each
            for name, each in self.stateful.items()
            if isinstance(each, Component) and not each.required
        }
        problems = {n: c.save_problem or "" for n, c in optional.items()}
        # If multiple hosts cannot save a component, the message names the first.
        of_hosts = [*enumerate(hosts.gather("left_out", problems) if problems else ())]
        for number, of_host in reversed(of_hosts):
            why |= {n: f"host {number}: {each}" for n, each in of_host.items() if each}
        for name in why:
            optional[name].save_problem = why[name]
        names = self.description.contents.components
        left = tuple(name for name in names if name not in why)
        description = self.description.changed(components=left)
        return dataclasses.replace(self, description=description), why

    def write_files(self) -> str | None:
        """Makes the components write their files.

        Any error must fail all hosts, which would otherwise wait for this one.

        Returns:
          The error message if the components could not be written; None otherwise.
        """
        try:
            self.write_components()
        except Exception as error:
            logging.exception("components were not written")
            is_told = isinstance(error, errors.ElasticCkptError | OSError)
            return f"components were not written: {error if is_told else repr(error)}"
        return None

    def contents(self, written: Sequence[Written], *, is_due: bool) -> Contents:
        """The contents of the step's manifests, without the arrays."""
        files = {path: size for each in written for path, size in each.files.items()}
        return dataclasses.replace(
            self.description.contents,
            leaves=tuple(Leaf.of_file(path, files[path]) for path in sorted(files)),
            time_ms=written[0].time_ms,
            is_due=is_due,
        )

    def diverged(self, hosts: Hosts, written: Sequence[Written]) -> str | None:
        """Describes the first part that hosts wrote differently, if any.

        Raises:
          HostsFailedError: if a host does not report its digests.
        """
        shared, _ = _differing([each.shared for each in written])
        if not shared:
            return None
        of_hosts = hosts.all(HostSaver.digests, self.step_id, shared)
        part, holders = _differing(of_hosts)
        numbers = sorted(number for some in holders.values() for number in some)
        return (
            f"{part} has different values on hosts {', '.join(map(str, numbers))}: one"
            " of them has a faulty device or faulty memory, or the hosts computed"
            " different values; the step was not saved"
        )


def _differing(
    of_hosts: Sequence[Mapping[str, str]], missing: str | None = None
) -> tuple[str, dict[str, list[int]]]:
    # The first name for which hosts have different strings, and the hosts by string.
    for name in sorted(set().union(*of_hosts)):
        hosts: dict[str, list[int]] = {}
        for number, of_host in enumerate(of_hosts):
            text = of_host.get(name, missing)
            if text is not None:
                hosts.setdefault(text, []).append(number)
        if len(hosts) > 1:
            return name, hosts
    return "", {}
