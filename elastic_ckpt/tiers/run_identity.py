"""The identity of a run: its storage and its RAM disks have the same one.

Two runs may have the same name, and then the same path in RAM, for example after the
output of one was removed. So each run has a random identity, in `run.json` beside its
steps in persistent storage, created once when it first starts, and in each of its RAM
disks. A RAM disk of another run is refused.

A run from before there were identities gets one at its next start. Its RAM counts if
the newest step there and the newest one in storage are of one line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence

from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, errors, storage
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.persistent import claims, persistent_root
from elastic_ckpt.tiers.ram import ram_disk

FILE = "run.json"
_VERSION = 1
_WHAT = "identity of a run"
# The saves of a line, oldest first, each with the last step of it.
Saves = tuple[StepId, ...]


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
      identity: of the run; None if it has none yet.
      has_steps: whether there may be steps.
      is_out_of_reach: whether the directory cannot be read now.
    """

    directory: str
    identity: Identity | None
    has_steps: bool = True
    is_out_of_reach: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lines:
    """The lines of what a host finds; see `related`.

    Attributes:
      in_ram: of the newest save in its RAM disk; empty if there is none.
      in_storage: of the newest save and the newest claim, if it is host 0.
    """

    in_ram: Saves
    in_storage: tuple[Saves, ...]


def agreed(
    stored: Place | None,
    disks: Sequence[Place],
    lines: Callable[[], Sequence[Lines]],
    *,
    fresh: str,
) -> Identity | None:
    """The identity of the run that hosts start; None if it cannot be known now.

    All hosts call it with the same arguments.

    Args:
      stored: of the run's persistent storage; None if it has none.
      disks: of each host.
      lines: of each host; called if they decide.
      fresh: the name of a new identity.

    Raises:
      RunError: if a RAM disk has steps of another run.
    """
    holding = [each for each in disks if each.has_steps]
    known = [each.identity for each in holding if each.identity is not None]
    if stored is None or stored.is_out_of_reach:
        # The disks of one run have one identity, or none yet.
        (most, _), *_ = Counter(known).most_common(1) or [(None, 0)]
        for number, each in enumerate(disks):
            if each.has_steps and each.identity not in (None, most):
                raise _refused(number, each, "other hosts", disks)
        return most or (
            Identity(name=fresh, is_stored=False) if stored is None else None
        )
    expected = stored.identity
    if expected is None:
        if not holding:
            return Identity(name=fresh, is_stored=True)
    elif all(each.name == expected.name for each in known) and len(known) == len(
        holding
    ):
        return dataclasses.replace(expected, is_stored=True)
    of_hosts = lines()
    in_storage = of_hosts[0].in_storage
    counted: Counter[str] = Counter()
    for number, (each, of_host) in enumerate(zip(disks, of_hosts, strict=True)):
        if not each.has_steps or _is_same(each, expected):
            continue
        is_decided = expected is not None and each.identity is not None
        had_no_storage = each.identity is not None and not each.identity.is_stored
        if is_decided or not (
            any(related(of_host.in_ram, each) for each in in_storage)
            or (had_no_storage and not in_storage)
        ):
            if expected is None and not in_storage:
                steps = [saves.in_ram[-1][0] for saves in of_hosts if saves.in_ram]
                raise _without_storage(stored, each, max(steps, default=0))
            raise _refused(number, each, stored.directory, disks)
        if each.identity is not None:
            counted[each.identity.name] += 1
    if expected is None and counted:
        return Identity(name=counted.most_common(1)[0][0], is_stored=True)
    return expected or Identity(name=fresh, is_stored=True)


def related(one: Saves, other: Saves) -> bool:
    """Whether one line contains the newest save of the other one.

    Args:
      one: the line of a save, which is its last item.
      other: likewise.
    """
    return _contains(one, other) or _contains(other, one)


def of_disk(disk: ram_disk.RamDisk) -> Place:
    """The RAM disk of a machine."""
    return Place(
        directory=os.fspath(disk.root),
        identity=_read(disk.root),
        has_steps=bool(disk.all_saves()),
    )


def of_storage(directory: epath.PathLike) -> Place:
    """The persistent storage of a run."""
    path = storage.absolute(directory)
    try:
        return Place(directory=os.fspath(path), identity=_read(path))
    except bucket_clients.failures():
        return Place(directory=os.fspath(path), identity=None, is_out_of_reach=True)


def line_in_ram(disk: ram_disk.RamDisk) -> Saves:
    """The line of the newest save in a RAM disk; empty if there is none."""
    newest_first = sorted(
        disk.all_saves(), key=lambda each: (each[1].save, each[1].step), reverse=True
    )
    for slot, step_id in newest_first:
        try:
            contents = disk.manifest(slot, step_id).contents
        except errors.CheckpointError:
            continue
        return (*contents.parents, step_id)
    return ()


def lines_in_storage(directory: epath.PathLike) -> tuple[Saves, ...]:
    """The lines of the newest save and the newest claim in persistent storage.

    Raises:
      CheckpointError: if storage is out of reach.
    """
    root = persistent_root.PersistentRoot.from_path(directory)
    lines: list[Saves] = []
    for step in reversed(root.steps()):
        manifest = persistent_root.any_manifest(root.final(step))
        if manifest is not None:
            lines.append((*manifest.contents.parents, manifest.step_id))
            break
    claim = claims.newest(root.path)
    if claim is not None:
        parents = claim.line.parents
        # Its first step is later than the one that it goes on from.
        last_step = parents[-1].step if parents else 0
        lines.append((*parents, StepId(last_step, claim.line.save)))
    return tuple(lines)


def write(disk: ram_disk.RamDisk, identity: Identity) -> None:
    """Makes a RAM disk that of a run."""
    if _read(disk.root) != identity:
        storage.write_atomic(disk.root / FILE, _to_bytes(identity))


def create(directory: epath.PathLike, identity: Identity) -> None:
    """Gives persistent storage the identity of its run, unless it has it.

    Raises:
      RunError: if another run has taken the directory meanwhile.
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    path = storage.absolute(directory)
    storage.make_directory(path)
    if not storage.create(path / FILE, _to_bytes(identity)):
        there = _read(path)
        if there is None or there.name != identity.name:
            raise errors.RunError(
                f"another run started in {path} at the same time; start this one"
                " again, in another directory if you want both"
            )


def check(directory: epath.PathLike, identity: Identity) -> None:
    """Checks that storage is still that of the run.

    Raises:
      ReplacedError: if it was removed, or another run has begun there.
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    path = storage.absolute(directory)
    there = _read(path)
    if there is None or there.name != identity.name:
        what = "was removed" if there is None else "was removed, and is another run's,"
        raise errors.ReplacedError(
            f"{path} {what} while this run was writing to it (its {FILE} is gone)."
            " What the run had saved there is lost, so it stops; start it again, under"
            " another name if another run needs the directory"
        )


def new_name() -> str:
    """The name of a new identity."""
    return secrets.token_hex(16)


def _is_same(place: Place, expected: Identity | None) -> bool:
    known = place.identity
    return known is not None and expected is not None and known.name == expected.name


def _contains(line: Saves, other: Saves) -> bool:
    if not line or not other:
        return False
    step, save = other[-1]
    last_step = {name: number for number, name in line}.get(save)
    return last_step is not None and (step <= last_step or save == line[-1][1])


def _refused(
    number: int, disk: Place, other: str, disks: Sequence[Place]
) -> errors.RunError:
    host = f"host {number}: " if len(disks) > 1 else ""
    return errors.RunError(
        f"{host}{disk.directory} contains steps of another run, not of {other}; choose"
        " another run_name (another directory of ec.Local), or, if nobody needs these"
        f" steps, remove the directory: rm -r {disk.directory}"
    )


def _without_storage(stored: Place, disk: Place, step: int) -> errors.RunError:
    # Whoever copies the identity says that the storage is to be that of this run.
    return errors.RunError(
        f"{stored.directory} has no steps, but {disk.directory} holds step {step} of a"
        " run that was stored. If the storage of this run is gone or was replaced, RAM"
        " holds the only copy: to continue from it, copy"
        f" {os.path.join(disk.directory, FILE)} to"
        f" {os.path.join(stored.directory, FILE)} and start again; for the weights"
        f" alone, elastic-ckpt convert {disk.directory} DIRECTORY/{step}. If these are"
        " steps of another run, choose another run_name (another directory of"
        " ec.Local), or, if nobody needs them, remove the directory: rm -r"
        f" {disk.directory}"
    )


def _to_bytes(identity: Identity) -> bytes:
    fields: dict[str, storage.Json] = {
        "name": identity.name,
        "is_stored": identity.is_stored,
    }
    return checked_json.to_bytes(fields, version=_VERSION)


def _read(directory: epath.Path) -> Identity | None:
    path = directory / FILE
    try:
        fields = checked_json.parse(path.read_bytes(), what=_WHAT, version=_VERSION)
    except FileNotFoundError:
        return None
    except checked_json.UnreadableError as error:
        raise errors.CheckpointError(
            f"{path}, the {_WHAT}, {error}; restore the file from a copy, or remove it"
            " to have the steps themselves tell whose they are"
        ) from None
    return Identity(name=fields["name"], is_stored=fields["is_stored"])


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
