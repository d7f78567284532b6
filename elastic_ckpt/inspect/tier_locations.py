"""The locations of a run's tiers, inspected from outside of any world.

A location is a RAM disk on this machine, the agent of another machine, or persistent
storage. Several locations are searched together, as in a restore: the parts of a
complete step may lie in any of them. Inspection only reads, and does not disturb a
running job.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Protocol

from etils import epath

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.manifests import layout, manifest_file
from elastic_ckpt.manifests.holdings import Offer
from elastic_ckpt.manifests.line import Line
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.peers import peer, peer_client
from elastic_ckpt.tiers.persistent import persistent_root, persistent_tier
from elastic_ckpt.tiers.ram import machine, ram_disk
from elastic_ckpt.tiers.source import Offered, Source, Tier


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leftover:
    """A part of a step that is not committed: it is being written, or was interrupted.

    Attributes:
      step: its number.
      path: of the directory.
    """

    step: int
    path: str


class Location(Protocol):
    """A RAM disk, an agent, or persistent storage."""

    @property
    def tier(self) -> Tier:
        """The tier that reads the steps of this location."""
        ...

    def directory(self, offer: Offer) -> str:
        """The directory or URL of the offered files, for messages."""
        ...

    def leftovers(self) -> list[Leftover]:
        """The uncommitted parts of steps at this location, ascending."""
        ...

    def preserved(self) -> list[int]:
        """The steps at this location that are preserved by hand, ascending."""
        ...


class RamLocation:
    """A RAM disk on this machine.

    Args:
      root: its directory.
      run: the identity of the run.
    """

    def __init__(self, root: epath.PathLike, *, run: str) -> None:
        self._disk = ram_disk.RamDisk(root, run=run)

    @property
    def tier(self) -> Tier:
        """See `Location`."""
        return self

    def steps(self) -> Sequence[int]:
        """See `source.Tier`."""
        return self._disk.steps()

    def known_saves(self) -> Sequence[tuple[int, str]]:
        """See `source.Tier`."""
        return self._disk.known_saves()

    def offers(self, step: int) -> Offered:
        """See `source.Tier`; manifests of another machine are problems too."""
        offered = self._disk.offers(step)
        strange = [
            f"manifest {directory / name} is not of the machine that"
            f" {self._disk.root / machine.FILE} names; bring that file back"
            for number, _, directory in self._uncommitted()
            for name in persistent_root.manifest_names(directory)
            if number == step
        ]
        return Offered(sources=offered.sources, problems=[*offered.problems, *strange])

    def directory(self, offer: Offer) -> str:
        """See `Location`."""
        return str(self._disk.root / _directory(offer))

    def leftovers(self) -> list[Leftover]:
        """See `Location`."""
        return [
            Leftover(step=step, path=str(directory))
            for step, _, directory in self._uncommitted()
            if not persistent_root.manifest_names(directory)
        ]

    def preserved(self) -> list[int]:
        """See `Location`."""
        return self._disk.preserved()

    def _uncommitted(self) -> Iterator[tuple[int, str, epath.Path]]:
        for slot in self._disk.slots():
            for step, save in self._disk.saves(slot):
                if not self._disk.manifest_path(slot, step, save).exists():
                    yield step, save, self._disk.step_directory(slot, step, save)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerLocation:
    """The RAM disk of another machine, through its agent.

    Attributes:
      url: of the agent.
      tier: the peer.
    """

    url: str
    tier: peer.Peer

    def directory(self, offer: Offer) -> str:
        """See `Location`."""
        return f"{self.url}/v1/{_directory(offer)}"

    def leftovers(self) -> list[Leftover]:
        """An empty list: an agent lists only committed steps."""
        return []

    def preserved(self) -> list[int]:
        """An empty list: an agent does not report preserved steps."""
        return []


class PersistentLocation:
    """Persistent storage.

    Args:
      root: of the steps.
      run: the identity of the run.
      only: the one step to look at; None for all.
    """

    def __init__(
        self,
        root: persistent_root.PersistentRoot,
        *,
        run: str,
        only: int | None = None,
    ) -> None:
        self._root = root
        self._only = only
        self._tier = persistent_tier.PersistentTier(root, run=run)

    @property
    def tier(self) -> Tier:
        """See `Location`."""
        return self

    def steps(self) -> Sequence[int]:
        """See `source.Tier`."""
        return self._wanted(self._tier.steps())

    def known_saves(self) -> Sequence[tuple[int, str]]:
        """See `source.Tier`."""
        return self._tier.known_saves()

    def recorded_lines(self) -> Sequence[Line]:
        """The newest line, if it has no step in storage yet."""
        return self._tier.recorded_lines()

    def foreign_steps(self) -> dict[int, str]:
        """The directories of steps that Orbax saved without us, by their numbers."""
        steps = self._wanted(self._tier.foreign_steps())
        return {step: str(self._root.final(step)) for step in steps}

    def offers(self, step: int) -> Offered:
        """See `source.Tier`."""
        if self._only not in (None, step):
            return Offered(sources={}, problems=())
        return self._tier.offers(step)

    def directory(self, offer: Offer) -> str:
        """See `Location`."""
        save = (offer.manifest.step, offer.manifest.save)
        if save in self._set_aside:
            return str(self._root.aside(*save))
        return str(self._root.final(offer.manifest.step))

    def leftovers(self) -> list[Leftover]:
        """See `Location`."""
        return [
            Leftover(step=each.step, path=str(each.path))
            for each in self._root.leftovers()
            if self._only in (None, each.step)
        ]

    def preserved(self) -> list[int]:
        """See `Location`."""
        preserved = {*self._tier.preserved(), *self._tier.preserved_aside()}
        return self._wanted(sorted(preserved))

    @functools.cached_property
    def _set_aside(self) -> frozenset[tuple[int, str]]:
        return frozenset(self._root.set_aside_steps())

    def _wanted(self, steps: list[int]) -> list[int]:
        return [step for step in steps if self._only in (None, step)]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Copy:
    """The copy of a step at one holder, and its directory.

    Attributes:
      source: reads it.
      directory: its directory or URL, for messages.
    """

    source: Source
    directory: str


class Locations:
    """Several locations together.

    Args:
      locations: any number.

    Attributes:
      locations: as given.
    """

    def __init__(self, locations: Sequence[Location]) -> None:
        self.locations = tuple(locations)

    @functools.cached_property
    def steps(self) -> list[int]:
        """The steps that may have files, ascending."""
        return sorted({step for each in self.locations for step in each.tier.steps()})

    @functools.cached_property
    def line(self) -> Line:
        """The line of the newest save: steps that it abandons do not count."""
        stored = [
            each for each in self.locations if isinstance(each, PersistentLocation)
        ]
        lines = [line for each in stored for line in each.recorded_lines()]
        return find.Search([each.tier for each in self.locations], lines=lines).line

    @functools.cached_property
    def foreign_steps(self) -> dict[int, str]:
        """The directories of steps that Orbax saved without us, by their numbers."""
        steps: dict[int, str] = {}
        for each in self.locations:
            if isinstance(each, PersistentLocation):
                steps.update(each.foreign_steps())
        return dict(sorted(steps.items()))

    def look(self, step: int) -> tuple[dict[Offer, Copy], list[str]]:
        """The copies of a step, each holder once, and problems of unreadable ones."""
        copies: dict[Offer, Copy] = {}
        problems: list[str] = []
        seen: set[tuple[str, str, str]] = set()
        for location in self.locations:
            offered = location.tier.offers(step)
            problems += offered.problems
            for offer, source in offered.sources.items():
                directory = location.directory(offer)
                # A machine may be given by its path and by its agent; both are one
                # memory.
                memory = "" if offer.tier == "local" else directory
                holder = (memory, offer.host.id, offer.manifest.save)
                if holder not in seen:
                    seen.add(holder)
                    copies[offer] = Copy(source=source, directory=directory)
        return copies, problems

    def leftovers(self) -> list[Leftover]:
        """The uncommitted parts of steps, ascending by step."""
        leftovers = [
            each for location in self.locations for each in location.leftovers()
        ]
        return sorted(leftovers, key=lambda each: (each.step, each.path))

    def preserved(self) -> list[int]:
        """The steps that are preserved by hand, without those of peers, ascending."""
        return sorted(
            {step for location in self.locations for step in location.preserved()}
        )


def at_path(path: epath.PathLike, *, run: str) -> Location:
    """The RAM disk, the directory of steps, or the one step at `path`.

    Raises:
      CheckpointError: if it is none of these.
    """
    directory = storage.absolute(path)
    if is_ram_disk(directory):
        return RamLocation(directory, run=run)
    # A step is named by its number, and holds what a directory of steps does not.
    if directory.name.isdecimal() and (
        (directory / "_CHECKPOINT_METADATA").exists()
        or persistent_root.manifest_names(directory)
    ):
        root = persistent_root.PersistentRoot.from_path(directory.parent)
        return PersistentLocation(root, run=run, only=int(directory.name))
    if not directory.is_dir():
        raise errors.CheckpointError(
            f"{path}: there is no such directory; name that of a run, a RAM disk, the"
            " directory of steps in persistent storage, or one of these steps"
        )
    return at_steps(directory, run=run)


def at_steps(path: epath.PathLike, *, run: str) -> PersistentLocation:
    """The directory of steps at `path`, which need not be there yet."""
    return PersistentLocation(persistent_root.PersistentRoot.from_path(path), run=run)


def at_peer(url: str, client: peer_client.PeerClient, *, run: str) -> PeerLocation:
    """The RAM disk that the agent at `url` serves."""
    return PeerLocation(url=url, tier=peer.Peer(url, client, run))


def is_ram_disk(directory: epath.Path) -> bool:
    """Whether `directory` is the RAM disk of a machine and run."""
    return (directory / machine.FILE).exists() and (directory / "hosts").exists()


def find_run(path: epath.PathLike) -> str | None:
    """The run of the first manifest at `path` that can be read; None without one."""
    for directory in _step_directories(storage.absolute(path)):
        for name in persistent_root.manifest_names(directory):
            try:
                return manifest_file.parse(
                    (directory / name).read_bytes(), stores=True
                ).run
            except (OSError, checked_json.UnreadableError):
                continue
    return None


def is_step(path: epath.PathLike) -> bool:
    """Whether a committed step, or a host's part of one, is at `path`."""
    directory = storage.absolute(path)
    if not directory.is_dir():
        return False
    if layout.parse_step_directory(directory.name) is not None:
        return bool(persistent_root.manifest_names(directory))
    root = persistent_root.PersistentRoot.from_path(directory.parent)
    return directory.name.isdecimal() and int(directory.name) in root.steps()


def _step_directories(directory: epath.Path) -> Iterator[epath.Path]:
    if is_ram_disk(directory):
        for slot in (directory / "hosts").iterdir():
            yield from (each for each in slot.iterdir() if each.is_dir())
    elif directory.is_dir():
        yield directory
        yield from (
            each
            for each in directory.iterdir()
            if each.name.isdecimal() and each.is_dir()
        )


def _directory(offer: Offer) -> str:
    held = offer.manifest
    slot = held.host.id.rpartition(".")[2]
    return f"hosts/{slot}/{layout.step_directory(held.step, held.save)}"
