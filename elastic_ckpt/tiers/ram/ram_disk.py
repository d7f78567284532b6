"""The RAM disk of a machine: what its processes hold of a run's steps, in memory.

    machine                        the id of this machine's memory, made once
    run.json                       the identity of the run, see `run_files`
    holds/<step>-<save>            keeps a step for a reader, see `preserved`
    hosts/<slot>/lock              held by the process whose steps these are
    hosts/<slot>/repairs.lock      of repairs while it lives, see `held_off`
    hosts/<slot>/messages/         messages to other hosts, as long as they need them
    hosts/<slot>/spare/            files that are in no step, see `chunk_files`
    hosts/<slot>/<step>-<save>/    a step of that process, see `layout`; a file
                                   `preserve` in it keeps it, regardless of policies

Any process may read all of it, even if the writers are dead: a directory outlives its
process, and is lost only with the machine's memory.

A process alone writes its slot (`local`), and puts its bad copies right. A slot whose
process has ended - that of an idle machine, or of a slot that the present world does
not use - is repaired by the machine's agent, or by another process there
(`put_right`): a file is replaced only by the bytes that the manifest beside it lists,
so a repair cannot make a good copy bad. The process of a backup host has no good copies
to repair its slot from: it lets others do so while it lives (`held_off`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np
from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import (
    Leaf,
    Manifest,
    is_manifest_name,
    manifest_name,
    read_manifest,
)
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import preserved, stored_part
from elastic_ckpt.tiers.ram import machine
from elastic_ckpt.tiers.source import (
    PIECE_BYTES,
    Copy,
    Leftover,
    Offered,
    OnPiece,
    ReadError,
    RepairError,
    ignored,
)

# In the directory of a step that is being written: how large it will be.
RESERVED = "reserved"
# The directory of a slot into which a restore unpacks files.
RESTORED = "restored"
# The directory of a slot with files of chunks that are in no step (`chunk_files`).
SPARE = "spare"
# The directory of a slot with messages to other hosts (`peers.mailbox`).
MESSAGES = "messages"
# In a slot: held by its process, and by repairs while that lives.
LOCK = "lock"
_REPAIRS = "repairs.lock"
_BLOCK_BYTES = 512


class RamDisk:
    """The directory of one machine and run; a tier to restore from.

    Attributes:
      root: the directory.
      run: the identity of the run.
      limit_bytes: of all slots together; None leaves it to the file system.
    """

    def __init__(
        self, root: epath.PathLike, *, run: str, limit_bytes: int | None = None
    ) -> None:
        self.root = storage.absolute(root)
        self.run = run
        self.limit_bytes = limit_bytes

    @functools.cached_property
    def machine(self) -> str:
        """The id of this machine's memory, the same in all processes: 16 hex digits."""
        return machine.machine_id(self.root)

    def host_id(self, slot: int) -> str:
        """The id of the host that one process of this machine is."""
        return f"{self.machine}.{slot}"

    def host_directory(self, slot: int) -> epath.Path:
        """The directory of the steps of one process."""
        return self.root.joinpath("hosts", str(slot))

    def locked(self, slot: int) -> AbstractContextManager[None]:
        """Makes this process the one of a slot; a RunError if a live one has it."""
        return storage.exclusive_lock(self.host_directory(slot) / LOCK)

    def slots(self) -> list[int]:
        """Those that have a directory, ascending."""
        names = _names(self.root / "hosts")
        return sorted(int(name) for name in names if name.isdecimal())

    def saves(self, slot: int) -> list[StepId]:
        """The steps and saves of which a slot has a directory, ascending."""
        names = _names(self.host_directory(slot))
        return sorted(filter(None, map(StepId.parse, names)))

    def all_saves(self) -> list[tuple[int, StepId]]:
        """The slot and step of each directory of a step, ascending."""
        return [(slot, each) for slot in self.slots() for each in self.saves(slot)]

    def step_directory(self, slot: int, step_id: StepId) -> epath.Path:
        """The directory of one save of a step in a slot."""
        return self.root.joinpath("hosts", str(slot), str(step_id))

    def manifest_path(self, slot: int, step_id: StepId) -> epath.Path:
        """The path of the manifest of a committed save."""
        name = manifest_name(self.host_id(slot))
        return self.step_directory(slot, step_id) / name

    def steps(self) -> Sequence[int]:
        """The steps that may have files, ascending."""
        return sorted({each.step for _, each in self.all_saves()})

    def known_saves(self, slots: Collection[int] | None = None) -> list[StepId]:
        """The saves that have a manifest, readable or not, ascending.

        Args:
          slots: to look at; None for all.
        """
        return sorted(
            {
                each
                for slot, each in self.all_saves()
                if (slots is None or slot in slots)
                and _manifest_names(self.step_directory(slot, each))
            }
        )

    def offers(self, step: int, *, slots: Collection[int] | None = None) -> Offered:
        """The parts of a step, of all its saves.

        Manifests of another machine are problems.

        Args:
          step: the training step.
          slots: to look at; None for all.
        """
        copies: list[Copy] = []
        problems = []
        for slot, step_id in self.all_saves():
            if step_id.step != step or not (slots is None or slot in slots):
                continue
            directory = self.step_directory(slot, step_id)
            names = _manifest_names(directory)
            if manifest_name(self.host_id(slot)) not in names:
                problems += [
                    f"manifest {directory / name} is not of the machine that"
                    f" {self.root / machine.FILE} names; bring that file back"
                    for name in names
                ]
                continue
            try:
                manifest = self.manifest(slot, step_id)
            except errors.CheckpointError as problem:
                problems.append(str(problem))
                continue
            copies.append(Copy(manifest, StepFiles(directory)))
        return Offered(copies, problems)

    def manifest(self, slot: int, step_id: StepId) -> Manifest:
        """The manifest of one save of a step in a slot.

        Raises:
          CheckpointError: if the manifest is missing, altered, or not of this place.
        """
        path = self.manifest_path(slot, step_id)
        manifest = read_manifest(path, run=self.run, step=step_id.step)
        if manifest.step_id != step_id:
            raise errors.CheckpointError(
                f"manifest {path} is that of save {manifest.step_id.save!r}, not of"
                f" {step_id.save!r}; what it lists counts as lost: remove it"
            )
        return manifest

    def preserved(self) -> list[int]:
        """The steps that are pinned on this machine, ascending."""
        return sorted(
            {
                each.step
                for slot, each in self.all_saves()
                if preserved.is_preserved(self.step_directory(slot, each))
            }
        )

    def kept(self) -> list[int]:
        """The steps that are pinned, or held by a reader, ascending."""
        return sorted({*self.preserved(), *preserved.held(self.root)})

    def leftovers(self) -> list[Leftover]:
        """The saves of steps without a manifest: being written, or cut short."""
        leftovers = [
            Leftover(
                step=each.step, save=each.save, path=self.step_directory(slot, each)
            )
            for slot, each in self.all_saves()
        ]
        return [each for each in leftovers if not _manifest_names(each.path)]

    def free_bytes(self) -> int:
        """The free bytes under the limit and in the file system, less reserved ones."""
        used = promised = sum(
            used_bytes(os.fspath(self.host_directory(slot) / SPARE))
            for slot in self.slots()
        )
        for each in self.all_saves():
            directory = self.step_directory(*each)
            written = reserved = used_bytes(os.fspath(directory))
            # A committed step reserves nothing more.
            with contextlib.suppress(FileNotFoundError):
                reserved = int((directory / RESERVED).read_text())
            used += written
            promised += max(written, reserved)
        system = os.statvfs(self.root)
        free = system.f_bavail * system.f_frsize - (promised - used)
        if self.limit_bytes is None:
            return free
        return min(free, self.limit_bytes - promised)


class StepFiles:
    """The source of one step in a RAM disk: its files; it follows no links in it.

    Attributes:
      directory: of the step.
    """

    def __init__(self, directory: epath.PathLike) -> None:
        self.directory = os.fspath(directory)

    def read_into(
        self, leaf: Leaf, box: Box, into: memoryview, on_piece: OnPiece = ignored
    ) -> None:
        """See `source.Source`; reads without a copy."""
        done = 0
        with self._opened(leaf, box) as file:
            while done < len(into):
                piece = into[done : done + PIECE_BYTES]
                read = file.readinto(piece)
                if not read:
                    raise ReadError(
                        f"ends after {done} bytes, and {len(into)} were to be there"
                    )
                on_piece(piece[:read])
                done += read

    def size(self, leaf: Leaf, box: Box) -> int:
        """See `source.Source`."""
        with self._opened(leaf, box) as file:
            return os.fstat(file.fileno()).st_size

    def put_right(self, leaf: Leaf, box: Box, content: bytes) -> None:
        """Replaces a bad copy whose process is gone; see `source.RepairableSource`."""
        put_right(self.directory, layout.part_file(leaf, box), content)

    @contextlib.contextmanager
    def _opened(self, leaf: Leaf, box: Box) -> Iterator[io.FileIO]:
        try:
            path = _unlinked(self.directory, layout.part_file(leaf, box))
            with open(path, "rb", buffering=0) as file:
                yield file
        except FileNotFoundError:
            raise ReadError("is missing") from None
        except OSError as error:
            raise ReadError(f"cannot be read ({error.strerror})") from None


def held_off(slot: epath.PathLike) -> AbstractContextManager[None]:
    """Keeps others from repairing files of a slot, and lets them do so afterwards.

    The process of the slot calls it at its start, and to remove steps.

    Args:
      slot: its directory.
    """
    return storage.exclusive_lock(os.path.join(slot, _REPAIRS), waits=True)


def put_right(directory: epath.PathLike, file: str, content: bytes) -> None:
    """Replaces a file of a committed step by what was saved, atomically.

    Args:
      directory: of the step, `<root>/hosts/<slot>/<step>-<save>`.
      file: as the manifest of the slot lists it.
      content: all bytes of the file.

    Raises:
      RepairError: if the manifest cannot be read or does not list these bytes, a live
        process has the slot, or the file cannot be written.
    """
    slot, step = os.path.split(os.fspath(directory))
    above, number = os.path.split(slot)
    root, below = os.path.dirname(above), os.path.join("hosts", number, step)
    try:
        name = manifest_name(f"{machine.find(root)}.{number}")
        path = _unlinked(root, os.path.join(below, name))
        saved = Manifest.parse(storage.read_bytes(path))
    except (OSError, ValueError, errors.CheckpointError) as error:
        raise RepairError(
            f"was not repaired: the manifest of its host cannot be read ({error})"
        ) from None
    _check(saved, file, content)
    lock = storage.exclusive_lock(os.path.join(slot, LOCK))
    if os.path.exists(os.path.join(slot, _REPAIRS)):
        lock = held_off(slot)
    try:
        with lock:
            # No process removes the step meanwhile, or has begun to.
            if not os.path.exists(path):
                raise RepairError("was not repaired: its step is gone")
            target = _unlinked(root, os.path.join(below, file))
            storage.write_atomic(target, content)
    except errors.RunError:
        raise RepairError(
            "was not repaired: a live process has the slot, and repairs its own copies"
            " when the step is restored"
        ) from None
    except OSError as error:
        raise RepairError(f"cannot be written ({error.strerror})") from None


def _check(saved: Manifest, file: str, content: bytes) -> None:
    leaves = saved.contents.leaves
    listed = {
        layout.part_file(leaves[number], box): (leaves[number], named)
        for number, box, named in saved.rows()
    }
    if file not in listed:
        raise RepairError("was not repaired: its manifest lists no such file")
    leaf, named = listed[file]
    damage = stored_part.damage(np.frombuffer(content, np.uint8), leaf, named)
    if damage is not None:
        raise RepairError(f"was not repaired: the copy {damage}")


def _unlinked(root: str, name: str) -> str:
    # The path of a file below a directory; an OSError if links lead to it.
    _, *places = itertools.accumulate(name.split("/"), os.path.join, initial=root)
    is_other = os.path.exists(places[-1]) and not os.path.isfile(places[-1])
    if is_other or any(map(os.path.islink, places)):
        raise OSError(errno.ELOOP, "it is behind a link, or no file")
    return places[-1]


def _names(directory: epath.Path) -> list[str]:
    # Empty if the directory does not exist, or is removed meanwhile.
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def _manifest_names(directory: epath.Path) -> list[str]:
    return sorted(filter(is_manifest_name, _names(directory)))


def used_bytes(directory: str) -> int:
    """The bytes that the files below a directory take on their file system."""
    total = 0
    for parent, _, files in os.walk(directory):
        for name in files:
            # Steps may be removed by their own process meanwhile.
            with contextlib.suppress(FileNotFoundError):
                blocks = os.lstat(os.path.join(parent, name)).st_blocks
                total += blocks * _BLOCK_BYTES
    return total
