"""Finds a run's tiers by their paths, from outside any world.

A tier is a RAM disk on this machine, another machine's agent, or persistent storage.
All tiers are searched together, as in a restore, because the parts of a complete step
may be in any of them. Inspection only reads and does not disturb the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

from etils import epath

from elastic_ckpt.checkpoint import foreign_steps
from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.steps.search import Looked
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.peers import peer_client, secret
from elastic_ckpt.tiers.peers.peer import Peer
from elastic_ckpt.tiers.persistent import persistent_root
from elastic_ckpt.tiers.persistent.persistent_tier import PersistentTier
from elastic_ckpt.tiers.persistent.run_files import read_agents
from elastic_ckpt.tiers.ram import machine
from elastic_ckpt.tiers.ram.ram_disk import RamDisk
from elastic_ckpt.tiers.source import HeldParts, Leftover, Offered

Location = RamDisk | Peer | PersistentTier


class Locations:
    """A run's tiers, searched together."""

    def __init__(self, tiers: Sequence[Location]) -> None:
        self._tiers = tiers
        # Agents list neither uncommitted nor preserved steps.
        self._own = [tier for tier in tiers if not isinstance(tier, Peer)]
        self._stored = [tier for tier in tiers if isinstance(tier, PersistentTier)]

    @functools.cached_property
    def line(self) -> Line:
        """The ancestry of the newest save, without abandoned steps."""
        lines = [line for each in self._stored for line in each.recorded_lines()]
        return find.search(self._tiers, lines=lines).line

    @functools.cached_property
    def foreign_steps(self) -> dict[int, str]:
        """The step directories from stock Orbax, keyed by step number."""
        return {
            step: str(each.root.final(step))
            for each in self._stored
            for step in each.foreign_saves()
        }

    @functools.cached_property
    def known(self) -> list[int]:
        """The sorted step numbers that may have files, including stock Orbax's."""
        ours = {each.step for each in find.saves(self._tiers)}
        return sorted({*ours, *self.foreign_steps})

    @functools.cached_property
    def stored(self) -> dict[int, epath.Path]:
        """The step directories in storage that Orbax can read, keyed by step number."""
        return {
            step: path
            for each in self._stored
            for step, path in foreign_steps.steps(each.root.path).items()
        }

    def look(self, step: int) -> Looked[FoundStep]:
        """A step's saves, with each holder once, and problems of unreadable parts."""
        held: dict[tuple[str, str, str], HeldParts] = {}
        problems: list[str] = []
        for tier in self._tiers:
            try:
                offered = tier.offers(step)
            except checked_json.LaterVersionError as error:
                offered = Offered([], [str(error)])
            problems += offered.problems
            for each in offered.held:
                (holder,), save = each.manifest.holders, each.manifest.step_id.save
                # A machine's path and its agent may both be listed, with one memory.
                memory = "" if holder.tier == "local" else each.source.directory
                held.setdefault((memory, holder.host.id, save), each)
        return find.looked(Offered([*held.values()], problems))

    def leftovers(self) -> list[Leftover]:
        """The uncommitted parts of steps, ordered by step; agents list none."""
        own = (each if isinstance(each, RamDisk) else each.root for each in self._own)
        leftovers = [each for place in own for each in place.leftovers()]
        return sorted(leftovers, key=lambda each: (each.step, str(each.path)))

    @functools.cached_property
    def preserved(self) -> set[int]:
        """The steps that are pinned in this machine's RAM or in storage."""
        return {step for tier in self._own for step in tier.preserved()}


@contextlib.contextmanager
def opened(
    paths: Sequence[str], *, secret_file: str | None = None
) -> Iterator[tuple[str, Locations]]:
    """Yields the run and the locations of its steps, open while the block runs.

    Args:
      paths: the paths of runs (including their steps in this machine's RAM), RAM disks,
        steps directories, or steps.
      secret_file: a file with the run's secret, which is needed to read other machines'
        RAM through the agents that are recorded next to the run's steps.

    Raises:
      CheckpointError: if a path does not exist, or `secret_file` is passed but no agent
        is recorded.
      RunError: if the file has no secret.
    """
    records = {path: run_files.read(path) for path in paths if run_files.is_run(path)}
    of_runs = [each.steps_directory for each in records.values()]
    given = [path for path in paths if path not in records]
    ram = (storage.absolute(each) for of in records.values() for each in of.ram)
    disks = [each for each in ram if each not in map(storage.absolute, given)]
    places: list[epath.PathLike] = [*of_runs, *given, *filter(is_ram_disk, disks)]
    agents = list(filter(None, map(read_agents, places))) if secret_file else []
    names = [*map(find_run, places), *(each.run for each in agents)]
    # Without a manifest, there are only steps from stock Orbax.
    run = next(filter(None, names), "")
    # The run may not have saved anything yet.
    locations: list[Location] = [
        (at_steps if each in of_runs else at_path)(each, run=run) for each in places
    ]
    with contextlib.ExitStack() as closing:
        if secret_file is not None:
            client = peer_client.PeerClient(secret.read(secret_file))
            closing.callback(client.close)
            urls = {url for of in agents if of.run == run for url in of.urls.values()}
            if not urls:
                raise errors.CheckpointError(
                    f"{', '.join(paths)}: no agents of the run's machines are recorded"
                    " there; specify the run's steps directory, or omit --secret-file"
                )
            locations += [Peer(url, client, run) for url in sorted(urls)]
        yield run, Locations(locations)


def at_path(path: epath.PathLike, *, run: str) -> Location:
    """The RAM disk, the steps directory, or the step at `path`.

    Raises:
      CheckpointError: if `path` is none of these.
    """
    directory = storage.absolute(path)
    if is_ram_disk(directory):
        return RamDisk(directory, run=run)
    # A step's directory has its number as name, and files that a steps directory lacks.
    if directory.name.isdecimal() and (
        (directory / "_CHECKPOINT_METADATA").exists()
        or persistent_root.manifest_names(directory)
    ):
        root = persistent_root.PersistentRoot.from_path(directory.parent)
        only = dataclasses.replace(root, only=int(directory.name))
        return PersistentTier(only, run=run)
    if not directory.is_dir():
        raise errors.CheckpointError(
            f"{path}: no such directory; specify a run directory, a RAM disk, a steps"
            " directory in persistent storage, or a step inside one"
        )
    return at_steps(directory, run=run)


def at_steps(path: epath.PathLike, *, run: str) -> PersistentTier:
    """The steps directory at `path`, which need not exist yet."""
    return PersistentTier(persistent_root.PersistentRoot.from_path(path), run=run)


def is_ram_disk(directory: epath.Path) -> bool:
    """Whether `directory` is a machine's RAM disk for a run."""
    return (directory / machine.FILE).exists() and (directory / "hosts").exists()


def find_run(path: epath.PathLike) -> str | None:
    """The run in the first readable manifest at `path`; None if there is none."""
    directory = storage.absolute(path)
    pattern = "hosts/*/[0-9]*" if is_ram_disk(directory) else "[0-9]*"
    places = itertools.chain([directory], directory.glob(pattern))
    runs = (persistent_root.run_of(each) for each in places if each.is_dir())
    return next(filter(None, runs), None)


def is_step(path: epath.PathLike) -> bool:
    """Whether `path` is a committed step or a host's part of one."""
    directory = storage.absolute(path)
    if not directory.is_dir():
        return False
    if StepId.parse(directory.name) is not None:
        return bool(persistent_root.manifest_names(directory))
    root = persistent_root.PersistentRoot.from_path(directory.parent)
    return directory.name.isdecimal() and int(directory.name) in root.steps()
