"""A machine's RAM disk: its processes' parts of a run's steps, in memory.

    machine                        the ID of this machine's memory, created once
    run.json                       the identity of the run, see `run_files`
    holds/<step>-<save>            keeps a step for a reader, see `preserved`
    hosts/<slot>/lock              held by the process that owns the slot
    hosts/<slot>/repairs.lock      for repairs and removals, see `repairing`
    hosts/<slot>/messages/         messages to other hosts, for as long as needed
    hosts/<slot>/staged/           files of components, until a save stores them
    hosts/<slot>/spare/            files that are not in a step, see `chunk_files`
    hosts/<slot>/<step>-<save>/    a step of that process, see `layout`; a
                                   `preserve` file in it keeps it, regardless of
                                   policies

Any process may read the whole disk, even if the writers are dead: a directory outlives
its process and is lost only with the machine's memory.

Only a slot's owner writes to it (`local`) and repairs its bad copies. Bad copies in
other slots (on an idle machine or a backup host, or from a process that is gone) are
repaired by the machine's agent, or by another process there (`repair`). A file is
replaced only by bytes with the digest that the manifest next to it lists, so a repair
cannot make a good copy bad.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import mmap
import os
import pathlib
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from elastic_ckpt.core import errors, host_memory, storage
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
    HeldParts,
    Leftover,
    Offered,
    OnPiece,
    ReadError,
    RepairError,
    ignored,
)

# In the directory of a step that is being written: the step's final size.
RESERVED = "reserved"
# A slot's directory for files that a restore unpacks.
RESTORED = "restored"
# A slot's directory for files that components write, until a save stores them.
STAGED = "staged"
# A slot's directory for chunk files that are not in a step (`chunk_files`).
SPARE = "spare"
# A slot's directory for messages to other hosts (`checkpoint.host.exchange`).
MESSAGES = "messages"
# In a slot, the lock held by the process that owns the slot.
LOCK = "lock"
_BLOCK_BYTES = 512


class RamDisk:
    """The RAM disk of one machine for one run; a tier to restore from.

    Attributes:
      limit_bytes: the limit for all slots together; None leaves the limit to the file
        system.
    """

    def __init__(
        self, root: epath.PathLike, *, run: str, limit_bytes: int | None = None
    ) -> None:
        self.root = storage.absolute(root)
        self.run = run
        self.limit_bytes = limit_bytes
        # By path: the functions that write the small files of this run.
        self._writes: dict[str, Callable[[], object]] = {}

    @functools.cached_property
    def machine(self) -> str:
        """The ID of this machine's memory, 16 hex digits, the same in all processes."""
        return machine.machine_id(self.root)

    def keep(
        self, path: epath.PathLike, write: Callable[..., object], *args: Any
    ) -> None:
        """Calls `write` with `args`, which writes a small file of the run.

        `put_back` calls it again if the file at `path` is gone.
        """
        write(*args)
        self._writes[os.fspath(path)] = functools.partial(write, *args)

    def put_back(self) -> None:
        """Writes the run's small files again that a cleaner of `/dev/shm` has removed.

        Raises:
          CheckpointError: if the machine's ID has changed.
          RunError: if another live process has taken this process's slot.
        """
        path, own = os.path.join(self.root, machine.FILE), self.machine
        write = functools.partial(storage.create, path, own.encode())
        for each, write_again in {path: write, **self._writes}.items():
            if not os.path.exists(each):
                logging.warning("%s was removed while in use; writing it again", each)
                storage.make_private_directory(self.root)
                write_again()
        if (found := machine.find(self.root)) != own:
            raise errors.CheckpointError(
                f"{path} contains {found}, but this process stores its steps under the"
                f" ID {own}, so a restarted run would not find them; find out which"
                " program changes the file, and restart the run"
            )

    def host_id(self, slot: int) -> str:
        """The ID of the host in a slot of this machine."""
        return f"{self.machine}.{slot}"

    def host_directory(self, slot: int) -> epath.Path:
        """The directory of a slot's steps."""
        return self.root.joinpath("hosts", str(slot))

    def slots(self) -> list[int]:
        """The slots that have a directory, in ascending order."""
        return sorted(map(int, filter(str.isdecimal, _names(self.root / "hosts"))))

    def saves(self, slot: int) -> list[StepId]:
        """The saves for which a slot has a directory, in ascending order."""
        return sorted(
            filter(None, map(StepId.parse, _names(self.host_directory(slot))))
        )

    def all_saves(self) -> list[tuple[int, StepId]]:
        """The slot and save of each step directory, in ascending order."""
        return [(slot, each) for slot in self.slots() for each in self.saves(slot)]

    def step_directory(self, slot: int, step_id: StepId) -> epath.Path:
        """The directory of one save of a step in a slot."""
        return self.root.joinpath("hosts", str(slot), str(step_id))

    def manifest_path(self, slot: int, step_id: StepId) -> epath.Path:
        """The path of the manifest of a committed save."""
        return self.step_directory(slot, step_id) / manifest_name(self.host_id(slot))

    def known_saves(self, slots: Collection[int] | None = None) -> list[StepId]:
        """The saves with a manifest in `slots` (default: all), in order."""
        return sorted({each for _, each in self._with_manifest(slots)})

    def offers(self, step: int, *, slots: Collection[int] | None = None) -> Offered:
        """The parts of all saves of a step in `slots` (default: all)."""
        held, problems = [], []
        for slot, step_id in self._with_manifest(slots):
            if step_id.step == step:
                files = StepFiles(self.step_directory(slot, step_id))
                try:
                    held.append(HeldParts(self.manifest(slot, step_id), files))
                except errors.CheckpointError as problem:
                    problems.append(str(problem))
        return Offered(held, problems)

    def _with_manifest(
        self, slots: Collection[int] | None
    ) -> Iterator[tuple[int, StepId]]:
        for slot, each in self.all_saves():
            if slots is None or slot in slots:
                names = _names(self.step_directory(slot, each))
                if any(map(is_manifest_name, names)):
                    yield slot, each

    def manifest(self, slot: int, step_id: StepId) -> Manifest:
        """The manifest of one save of a step in a slot.

        Raises:
          CheckpointError: if the manifest is missing or altered, or belongs to a
            different run or save.
        """
        path = self.manifest_path(slot, step_id)
        manifest = read_manifest(path, run=self.run, step=step_id.step)
        if manifest.step_id != step_id:
            raise errors.CheckpointError(
                f"manifest {path} belongs to save {manifest.step_id.save!r}, not to"
                f" {step_id.save!r}; its parts count as lost; remove the manifest"
            )
        return manifest

    def preserved(self) -> list[int]:
        """The steps that are pinned on this machine, in ascending order."""
        return sorted(
            {
                each.step
                for slot, each in self.all_saves()
                if preserved.is_preserved(self.step_directory(slot, each))
            }
        )

    def kept(self) -> list[int]:
        """The steps that are pinned or held by a reader, in ascending order."""
        return sorted({*self.preserved(), *preserved.held(self.root)})

    def leftovers(self) -> list[Leftover]:
        """The saves without a manifest: being written, or interrupted."""
        committed = set(self._with_manifest(None))
        return [
            Leftover(
                step=each.step, save=each.save, path=self.step_directory(slot, each)
            )
            for slot, each in self.all_saves()
            if (slot, each) not in committed
        ]

    def room_bytes(self) -> int:
        """The number of bytes that the run may use, including bytes already in use."""
        room = shutil.disk_usage(self.root).free + used_bytes(self.root)
        return min(room, self.limit_bytes or room)

    def free_bytes(self) -> int:
        """The bytes free under the limit and on the file system, minus reservations."""
        used = promised = 0
        for directory in pathlib.Path(self.root).glob("hosts/*/*"):
            written = reserved = used_bytes(directory)
            # A committed step, or a directory without a step, reserves no more space.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                reserved = int((directory / RESERVED).read_text())
            used += written
            promised += max(written, reserved)
        free = shutil.disk_usage(self.root).free - (promised - used)
        if self.limit_bytes is None:
            return free
        return min(free, self.limit_bytes - promised)


class StepFiles:
    """Reads one step on a RAM disk; a `source.Source`."""

    def __init__(self, directory: epath.PathLike) -> None:
        self.directory = os.fspath(directory)

    def read_into(
        self, leaf: Leaf, box: Box, into: memoryview, on_piece: OnPiece = ignored
    ) -> int:
        """See `source.Source`; reads without an extra copy."""
        done = 0
        with self._opened(leaf, box) as file:
            while done < len(into):
                piece = into[done : done + PIECE_BYTES]
                read = file.readinto(piece)
                if not read:
                    raise _short(done, len(into))
                on_piece(piece[:read])
                done += read
            return os.fstat(file.fileno()).st_size

    def lent(self, leaf: Leaf, box: Box) -> np.ndarray:
        """Maps the values of a part; see `source.LendingSource`."""
        num_bytes = leaf.num_bytes(box)
        with self._opened(leaf, box) as file:
            if (length := os.fstat(file.fileno()).st_size) < num_bytes:
                raise _short(length, num_bytes)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            return host_memory.map_file(
                file.fileno(), num_bytes, flags=flags, writes=False
            )

    @contextlib.contextmanager
    def _opened(self, leaf: Leaf, box: Box) -> Iterator[io.FileIO]:
        try:
            path = os.path.join(self.directory, layout.part_file(leaf, box))
            with open(path, "rb", buffering=0) as file:
                yield file
        except FileNotFoundError:
            raise ReadError("is missing") from None
        except OSError as error:
            errors.check_open_files(error)
            raise ReadError(f"cannot be read ({error.strerror})") from None

    def repair(self, leaf: Leaf, box: Box, content: bytes) -> None:
        """Replaces a bad copy in a slot; see `source.RepairableSource`."""
        repair(self.directory, layout.part_file(leaf, box), content)


def _short(length: int, least: int) -> ReadError:
    return ReadError(f"ends after {length} bytes, but should be {least} bytes long")


def repairing(slot: epath.PathLike) -> AbstractContextManager[None]:
    """Locks the slot at this path, to repair a file or to remove steps."""
    return storage.exclusive_lock(os.path.join(slot, "repairs.lock"), waits=True)


def repair(directory: epath.PathLike, file: str, content: bytes) -> None:
    """Replaces a bad file of a committed step, atomically.

    Args:
      directory: the step directory, `<root>/hosts/<slot>/<step>-<save>`.
      file: the file's path there, as the slot's manifest lists it.
      content: all bytes of the file, as saved.

    Raises:
      RepairError: if the manifest cannot be read or does not list these bytes, or the
        file cannot be written.
    """
    step = pathlib.Path(directory)
    slot, root = step.parent, step.parents[2]
    try:
        name = manifest_name(f"{machine.find(root)}.{slot.name}")
        path = _unlinked(root, f"hosts/{slot.name}/{step.name}/{name}")
        saved = Manifest.parse(storage.read_bytes(path))
        leaves = saved.contents.leaves
        listed = {
            layout.part_file(leaves[number], box): (leaves[number], named)
            for number, box, named in saved.rows()
        }
        if file not in listed:
            raise RepairError("was not repaired: its manifest does not list this file")
        problem = stored_part.damage(np.frombuffer(content, np.uint8), *listed[file])
        if problem is not None:
            raise RepairError(f"was not repaired: {problem}")
        with repairing(slot):
            # Fails if a removal of the step has begun; none can begin now.
            os.stat(path)
            target = _unlinked(root, f"hosts/{slot.name}/{step.name}/{file}")
            storage.write_atomic(target, content)
    except (OSError, ValueError, errors.CheckpointError) as error:
        raise RepairError(f"was not repaired: {error}") from None


def _unlinked(root: epath.PathLike, name: str) -> str:
    # The path of a file in a directory; raises an OSError if it is behind a link.
    _, *places = itertools.accumulate(
        name.split("/"), os.path.join, initial=os.fspath(root)
    )
    is_other = os.path.exists(places[-1]) and not os.path.isfile(places[-1])
    if is_other or any(map(os.path.islink, places)):
        raise OSError(errno.ELOOP, "it is behind a link, or is not a file")
    return places[-1]


def _names(directory: epath.Path) -> list[str]:
    # Empty if the directory does not exist, or is being removed.
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(directory)
    return []


def used_bytes(directory: epath.PathLike) -> int:
    """The file system space, in bytes, that the files in a directory use."""
    total = 0
    for parent, _, files in os.walk(directory, onerror=errors.check_open_files):
        for name in files:
            # Its owner may remove the step in the meantime.
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(parent, name))
                total += status.st_blocks * _BLOCK_BYTES
    return total
