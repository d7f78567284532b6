"""The small files of a run next to its steps: its identity, agents and evaluations.

    <directory>/run.json      the identity of the run
    <directory>/agents.json   by machine, the URL of its agent and when it was last in a
                              world, in seconds since 1970
    <root>/evaluations/<step>-<save>.json   metrics of training step <step>

The first two are in a run's storage and on each of its RAM disks. Two runs may have the
same name, and therefore the same path in RAM, for example after one run's output was
removed. So each run has a random identity, created by its first launch, and rejects a
different run's RAM disk.

Programs outside the run find its machines through the agents in storage; a new world
finds idle machines through the agents on its hosts' RAM disks. The entries are hints:
an agent may be gone, everything that it sends is verified, and the run's secret is not
in the file.

An evaluation applies to the saved step with the same number or, if there is none, to
the newest step before it (`steps.retention.with_evaluations`), and is removed with that
step. It stores its world's save: as with a step, the run's line (`steps.step`)
determines whether the evaluation counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from absl import logging
from etils import epath

from elastic_ckpt.core import bucket_clients, errors, storage
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.persistent import records
from elastic_ckpt.tiers.persistent.persistent_root import (
    PersistentRoot,
    committed,
    run_of,
)

IDENTITY = "run.json"
AGENTS = "agents.json"
EVALUATIONS = "evaluations"
# A machine that was not in any world for this long is dropped.
_REMEMBERED_SECS = 14 * 24 * 3600


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity of a run.

    Attributes:
      name: 32 random hex digits.
      is_stored: whether the run has, or ever had, persistent storage.
    """

    name: str
    is_stored: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsDirectory:
    """A directory of a run's steps: in storage, or a RAM disk.

    Attributes:
      identity: the identity of the run whose steps are in the directory; None if the
        directory does not belong to a run yet.
      is_out_of_reach: whether the directory is currently unreachable.
    """

    directory: str
    identity: Identity | None
    is_out_of_reach: bool = False


class Seen(NamedTuple):
    """An agent's URL, and when its machine was last in a world (secs since 1970)."""

    url: str
    secs: float


@dataclasses.dataclass(frozen=True)
class RunAgents:
    """A run's agents, by the ID of the machine's memory."""

    run: str
    agents: Mapping[str, Seen]

    @property
    def urls(self) -> dict[str, str]:
        """The URLs of the latest world's agents, by machine."""
        newest = max((each.secs for each in self.agents.values()), default=0)
        return {m: url for m, (url, secs) in self.agents.items() if secs == newest}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of one evaluation.

    Attributes:
      step: the training step that was evaluated, saved or not.
      save: the save of the world that evaluated the step, or of the saved step.
      metrics: the metrics, as a JSON object.
    """

    run: str
    step: int
    save: str
    metrics: str

    @property
    def step_id(self) -> StepId:
        """The step under that save."""
        return StepId(self.step, self.save)


def steps_directory(
    directory: epath.PathLike, *, has_steps: bool = True
) -> StepsDirectory:
    """Determines which run a steps directory (in storage or RAM) belongs to.

    Args:
      directory: the directory.
      has_steps: whether the directory has any steps; a RAM disk without steps does not
        belong to any run.

    Raises:
      CheckpointError: if the directory's identity file is damaged.
    """
    path = storage.absolute(directory)
    try:
        there = records.read(path / IDENTITY, Identity) if has_steps else None
    except records.OutOfReachError:
        return StepsDirectory(
            directory=os.fspath(path), identity=None, is_out_of_reach=True
        )
    return StepsDirectory(directory=os.fspath(path), identity=there)


def agreed(
    stored: StepsDirectory | None, disks: Sequence[StepsDirectory], *, fresh: str
) -> Identity | None:
    """Agrees on the identity of the run; None if it cannot be determined now.

    All hosts call this with the same arguments. A disk that was filled while storage
    was unreachable has no identity yet and gets the run's identity.

    Args:
      stored: the run's persistent storage; None if the run does not have any.
      disks: the RAM disk of each host.
      fresh: the name for a new identity.

    Raises:
      RunError: if a RAM disk has steps of another run.
    """
    of_disks = Counter(each.identity for each in disks if each.identity is not None)
    known = None if stored is None else stored.identity
    is_away = stored is not None and stored.is_out_of_reach
    is_new = stored is not None and known is None and not is_away
    if known is None and of_disks:
        known = of_disks.most_common(1)[0][0]
    if known is None:
        return None if is_away else Identity(name=fresh, is_stored=is_new)
    place_of_run = "other hosts" if stored is None else stored.directory
    for number, each in enumerate(disks):
        own = each.identity or dataclasses.replace(known, is_stored=False)
        remedy = (
            "choose a different run_name (with ec.Local, a directory), or, if nobody"
            f" needs these steps, remove the directory: rm -r {each.directory}"
        )
        # Only the name: hosts without storage do not know whether the run has storage.
        if own.name != known.name:
            raise errors.RunError(
                f"host {number}: {each.directory} contains steps of another run,"
                f" unlike {place_of_run}; {remedy}"
            )
        # By copying the identity, the user confirms that this is the run's storage.
        if is_new and own.is_stored:
            raise errors.RunError(
                f"{place_of_run} has no steps, but {each.directory} has steps of a"
                " run that had persistent storage. If this run's storage is gone or was"
                " replaced, RAM holds the only copy: to continue from it, copy"
                f" {os.path.join(each.directory, IDENTITY)} to"
                f" {os.path.join(place_of_run, IDENTITY)} and restart the run; to get"
                " only the weights, run"
                f" elastic-ckpt convert {each.directory} DIRECTORY/STEP."
                f" If these steps belong to another run, {remedy}"
            )
    is_stored = known.is_stored or stored is not None
    return dataclasses.replace(known, is_stored=is_stored)


def keep(directory: epath.PathLike, identity: Identity, *, is_first: bool) -> None:
    """Writes the run's identity to persistent storage, or checks it on later calls.

    Args:
      directory: the directory of the run's steps.
      identity: the identity of the run.
      is_first: whether this is the program's first call.

    Raises:
      ReplacedError: if the directory was removed or now belongs to another run.
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    path = storage.absolute(directory) / IDENTITY
    if is_first and storage.create(path, records.to_bytes(identity)):
        return
    there = records.read(path, Identity)
    if there is None or there.name != identity.name:
        raise errors.ReplacedError(
            f"{path} is gone or belongs to another run: the directory was removed"
            " while this run was writing to it, or another run started in it at the"
            " same time. This run's steps there are lost, so this run stops; restart"
            " it, in a different directory if the other run needs this one"
        )


def find_run(chosen: Chosen, *, in_storage: bool = True) -> str | None:
    """The run whose steps are in the local tier or, if it has none, in storage.

    An unnamed run keeps this name when tiers are added, removed or moved.

    Args:
      chosen: the tiers.
      in_storage: whether to look in storage.

    Returns:
      The run's name. None if there are no steps, or if storage is unreachable and the
      local tier has no steps: other hosts may have steps in RAM.

    Raises:
      CheckpointError: if storage is unreachable and there is no local tier.
    """
    return next(filter(None, _runs(chosen, in_storage)), None)


def _runs(chosen: Chosen, in_storage: bool) -> Iterator[str | None]:
    if chosen.local is not None:
        disk = storage.absolute(chosen.local.directory)
        # Any later use of an unreadable disk raises an error that says why.
        with contextlib.suppress(OSError, errors.CheckpointError):
            steps = (each for each in disk.glob("hosts/*/*") if each.is_dir())
            yield from map(run_of, steps)
    if in_storage and chosen.persistent is not None:
        root = PersistentRoot.from_path(chosen.persistent.directory)
        try:
            for step in reversed(root.steps()):
                yield committed(root.final(step))[0]
        except (errors.CheckpointError, *bucket_clients.failures()):
            if chosen.local is None:
                raise


def write_agents(directory: epath.PathLike, agents: RunAgents) -> None:
    """Replaces the recorded agents.

    Raises:
      CheckpointError: if storage is unreachable.
    """
    path = storage.absolute(directory) / AGENTS
    with records.within_reach(path):
        storage.write_atomic(path, records.to_bytes(agents))


def read_agents(directory: epath.PathLike) -> RunAgents | None:
    """Reads the recorded agents; None if there are none.

    Raises:
      CheckpointError: if storage is unreachable, or the record cannot be read.
    """
    there = records.read(storage.absolute(directory) / AGENTS, RunAgents)
    return there if there is not None and there.agents else None


def known_agents(root: epath.PathLike) -> dict[str, Seen]:
    """The agents recorded on a RAM disk; empty if the record is missing or damaged."""
    with contextlib.suppress(errors.CheckpointError):
        recorded = read_agents(root)
        return {} if recorded is None else dict(recorded.agents)
    return {}


def forget_agent(root: epath.PathLike, url: str) -> None:
    """Drops the agent at `url`, whose machine is gone."""
    recorded = read_agents(root)
    if recorded is not None:
        left = {m: each for m, each in recorded.agents.items() if each.url != url}
        write_agents(root, RunAgents(recorded.run, left))


def joined_agents(
    heard: Iterable[Mapping[str, Seen]], present: Mapping[str, str], *, now_secs: float
) -> dict[str, Seen]:
    """Merges the agents that hosts know; for each, the latest entry wins."""
    of_all = [each for agents in heard for each in agents.items()]
    newest = dict(sorted(of_all, key=lambda each: each[1].secs))
    oldest_secs = now_secs - _REMEMBERED_SECS
    recent = {m: each for m, each in newest.items() if each.secs > oldest_secs}
    return recent | {machine: Seen(url, now_secs) for machine, url in present.items()}


def record_evaluation(root: PersistentRoot, evaluation: Evaluation) -> None:
    """Records an evaluation, durably.

    Raises:
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    path = root.path / EVALUATIONS / f"{evaluation.step_id}.json"
    storage.write_atomic(path, records.to_bytes(evaluation))


def evaluations(root: PersistentRoot, line: Line, *, run: str) -> list[tuple[int, str]]:
    """A line's evaluations as pairs of training step and metrics (JSON), in step order.

    If a training step has two evaluations, the later save's evaluation comes last and
    takes precedence. Skips an evaluation if its step has been saved again since.

    Raises:
      CheckpointError: if storage is unreachable.
    """
    return [
        (each.step, each.metrics)
        for _, each in _evaluations(root)
        if each.run == run
        and each.save <= line.save
        and not line.abandons(each.step_id)
        and each.save >= committed(root.final(each.step))[1]
    ]


def forget_evaluations(
    root: PersistentRoot, steps: Collection[int], line: Line
) -> None:
    """Removes evaluations of saved steps, and abandoned ones that the line has passed.

    Raises:
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
      CheckpointError: if the evaluations cannot be listed.
    """
    saved = root.steps()
    for path, each in _evaluations(root):
        counts_for = max((step for step in saved if step <= each.step), default=None)
        is_passed = line.abandons(each.step_id) and each.step <= max(saved)
        if each.save <= line.save and (is_passed or counts_for in steps):
            storage.remove(path)


def _evaluations(root: PersistentRoot) -> Iterator[tuple[epath.Path, Evaluation]]:
    # Ascending by step and save.
    directory = root.path / EVALUATIONS
    stems = (name.removesuffix(".json") for name in records.names(directory))
    for step_id in sorted(filter(None, map(StepId.parse, stems))):
        path = directory / f"{step_id}.json"
        try:
            there = records.read(path, Evaluation)
        except records.OutOfReachError:
            raise
        except errors.CheckpointError as error:
            # A step with a lost metric counts as not evaluated.
            logging.warning("an evaluation was ignored: %s", error)
            continue
        if there is not None:
            yield path, there
