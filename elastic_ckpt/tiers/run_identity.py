"""The identity of a run: its storage and its RAM disks have the same one.

Two runs may have the same name, and then the same path in RAM, for example after the
output of one was removed. So each run has a random identity, in `run.json` beside its
steps in persistent storage, created once when it first starts, and in each of its RAM
disks. A RAM disk of another run is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections import Counter
from collections.abc import Sequence

from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, codec, errors, storage
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.persistent import persistent_root
from elastic_ckpt.tiers.ram import ram_disk

FILE = "run.json"
_VERSION = 1
_WHAT = "identity of a run"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity of a run.

    Attributes:
      name: random, 32 hex digits.
      is_stored: whether the run has persistent storage, or had it.
    """

    name: str
    is_stored: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """A directory of a run: in storage, or a RAM disk.

    Attributes:
      directory: of the run's steps.
      identity: of the run whose steps it has; None if it has none yet.
      is_out_of_reach: whether the directory cannot be read now.
    """

    directory: str
    identity: Identity | None
    is_out_of_reach: bool = False


def agreed(
    stored: Place | None, disks: Sequence[Place], *, fresh: str
) -> Identity | None:
    """The identity of the run that hosts start; None if it cannot be known now.

    All hosts call it with the same arguments. A disk that was filled while storage was
    out of reach has no identity yet, and takes that of the run.

    Args:
      stored: of the run's persistent storage; None if it has none.
      disks: of each host.
      fresh: the name of a new identity.

    Raises:
      RunError: if a RAM disk has steps of another run.
    """
    known = Counter(each.identity for each in disks if each.identity is not None)
    (expected, _), *_ = known.most_common(1) or [(None, 0)]
    is_new, other = False, "other hosts"
    if stored is not None:
        is_new = stored.identity is None and not stored.is_out_of_reach
        other = stored.directory
        expected = stored.identity or expected
    for number, each in enumerate(disks):
        if is_new and each.identity is not None and each.identity.is_stored:
            raise _without_storage(other, each)
        # By name: hosts without storage do not know whether the run has some.
        own = each.identity
        if expected is not None and own is not None and own.name != expected.name:
            raise _refused(number, each, other, disks)
    if expected is not None:
        is_stored = expected.is_stored or stored is not None
        return dataclasses.replace(expected, is_stored=is_stored)
    if stored is not None and stored.is_out_of_reach:
        return None
    return Identity(name=fresh, is_stored=stored is not None)


def of_disk(disk: ram_disk.RamDisk) -> Place:
    """The RAM disk of a machine."""
    return Place(
        directory=os.fspath(disk.root),
        identity=_read(disk.root) if disk.all_saves() else None,
    )


def of_storage(directory: epath.PathLike) -> Place:
    """The persistent storage of a run."""
    path = storage.absolute(directory)
    try:
        return Place(directory=os.fspath(path), identity=_read(path))
    except bucket_clients.failures():
        return Place(directory=os.fspath(path), identity=None, is_out_of_reach=True)


def write(disk: ram_disk.RamDisk, identity: Identity) -> None:
    """Makes a RAM disk that of a run."""
    if _read(disk.root) != identity:
        storage.write_atomic(disk.root / FILE, _to_bytes(identity))


def keep(directory: epath.PathLike, identity: Identity, *, is_first: bool) -> None:
    """Gives persistent storage the identity of its run, or checks that it is there.

    Args:
      directory: of the run's steps.
      identity: of the run.
      is_first: whether this program has not done it yet.

    Raises:
      RunError: if another run has taken the directory meanwhile.
      ReplacedError: if the directory was removed while this run was writing to it.
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    path = storage.absolute(directory)
    if is_first:
        storage.make_directory(path)
        if storage.create(path / FILE, _to_bytes(identity)):
            return
    there = _read(path)
    if there is not None and there.name == identity.name:
        return
    if is_first:
        raise errors.RunError(
            f"another run started in {path} at the same time; start this one again, in"
            " another directory if you want both"
        )
    what = "was removed" if there is None else "was removed, and is another run's,"
    raise errors.ReplacedError(
        f"{path} {what} while this run was writing to it (its {FILE} is gone). What the"
        " run had saved there is lost, so it stops; start it again, under another name"
        " if another run needs the directory"
    )


def new_name() -> str:
    """The name of a new identity."""
    return secrets.token_hex(16)


def _refused(
    number: int, disk: Place, other: str, disks: Sequence[Place]
) -> errors.RunError:
    host = f"host {number}: " if len(disks) > 1 else ""
    return errors.RunError(
        f"{host}{disk.directory} contains steps of another run, not of {other}; choose"
        " another run_name (another directory of ec.Local), or, if nobody needs these"
        f" steps, remove the directory: rm -r {disk.directory}"
    )


def _without_storage(stored: str, disk: Place) -> errors.RunError:
    # Whoever copies the identity says that the storage is to be that of this run.
    return errors.RunError(
        f"{stored} has no steps, but {disk.directory} holds steps of a run"
        " that was stored. If the storage of this run is gone or was replaced, RAM"
        " holds the only copy: to continue from it, copy"
        f" {os.path.join(disk.directory, FILE)} to"
        f" {os.path.join(stored, FILE)} and start again; for the weights"
        f" alone, elastic-ckpt convert {disk.directory} DIRECTORY/STEP. If these are"
        " steps of another run, choose another run_name (another directory of"
        " ec.Local), or, if nobody needs them, remove the directory: rm -r"
        f" {disk.directory}"
    )


def _to_bytes(identity: Identity) -> bytes:
    return checked_json.to_bytes(vars(identity), version=_VERSION)


def _read(directory: epath.Path) -> Identity | None:
    path = directory / FILE
    try:
        fields = checked_json.parse(path.read_bytes(), what=_WHAT, version=_VERSION)
        return codec.decode(Identity, fields)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise errors.CheckpointError(
            f"{path}, the {_WHAT}, {error}; restore the file from a copy"
        ) from None


def find_run(chosen: Chosen) -> str | None:
    """The run whose steps are in the local tier, or in the persistent one.

    A run that has no name keeps this one when tiers come, go or move.

    Returns:
      None if there are no steps, or if storage is out of reach: there may be some in
      the RAM of other hosts.

    Raises:
      CheckpointError: if storage is out of reach, and there is no local tier.
    """
    if chosen.local is None:
        assert chosen.persistent is not None
        return persistent_root.find_run(chosen.persistent.directory)
    found = _run_in_ram(storage.absolute(chosen.local.directory))
    if found is None and chosen.persistent is not None:
        with contextlib.suppress(errors.CheckpointError, *bucket_clients.failures()):
            found = persistent_root.find_run(chosen.persistent.directory)
    return found


def _run_in_ram(disk: epath.Path) -> str | None:
    # A directory that cannot be read is refused, with the reason, by those who use it.
    with contextlib.suppress(OSError):
        for slot in (disk / "hosts").iterdir():
            for step in slot.iterdir():
                if step.is_dir() and (run := persistent_root.run_of(step)):
                    return run
    return None
