"""Bad files of committed steps in a RAM disk, replaced though their process is gone.

A process alone writes its slot, and puts its bad copies right. A slot whose process
has ended - that of an idle machine, or of a slot that the present world does not use -
is repaired by the machine's agent, or by another process there. Both come here: a file
is replaced only by the bytes that the manifest beside it lists, so a repair cannot make
a good copy bad. The process of a backup host has no good copies to repair its slot
from: it lets others do so while it lives (`held_off`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
from etils import epath

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.steps import layout, manifest_file
from elastic_ckpt.steps.manifest import Manifest
from elastic_ckpt.tiers import no_follow, stored_part
from elastic_ckpt.tiers.ram import machine
from elastic_ckpt.tiers.source import RepairError

# In a slot that others repair while its process lives.
_REPAIRS = "repairs.lock"


def held_off(slot: epath.PathLike) -> AbstractContextManager[None]:
    """Keeps others from repairing files of a slot, and lets them do so afterwards.

    The process of the slot calls it at its start, and to remove steps.

    Args:
      slot: its directory.
    """
    return storage.exclusive_lock(os.path.join(slot, _REPAIRS), waits=True)


def replace(directory: epath.PathLike, file: str, content: bytes) -> None:
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
    root = os.path.dirname(os.path.dirname(slot))
    try:
        host = f"{machine.find(root)}.{os.path.basename(slot)}"
    except errors.CheckpointError as error:
        raise RepairError(f"was not repaired: {error}") from None
    below = [os.path.basename(slot), step]
    name = manifest_file.file_name(host)
    _check(_manifest(root, [*below, name]), file, content)
    try:
        with _unremoved(slot):
            # No process removes the step meanwhile, or has begun to.
            if not _is_file(root, [*below, name]):
                raise RepairError("was not repaired: its step is gone")
            _is_file(root, [*below, *file.split("/")])
            storage.write_atomic(os.path.join(directory, file), content)
    except errors.RunError:
        raise RepairError(
            "was not repaired: a live process has the slot, and repairs its own copies"
            " when the step is restored"
        ) from None
    except OSError as error:
        raise RepairError(f"cannot be written ({error.strerror})") from None


def _unremoved(slot: str) -> AbstractContextManager[None]:
    # Meanwhile no process removes steps of the slot.
    if os.path.exists(os.path.join(slot, _REPAIRS)):
        return held_off(slot)
    return storage.exclusive_lock(os.path.join(slot, "lock"))


def _manifest(root: str, names: Sequence[str]) -> Manifest:
    try:
        descriptor = no_follow.open_file(os.path.join(root, "hosts"), names)
        with os.fdopen(descriptor, "rb") as opened:
            return Manifest.parse(opened.read())
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except checked_json.UnreadableError as error:
        problem = str(error)
    raise RepairError(f"was not repaired: the manifest of its host {problem}")


def _check(saved: Manifest, file: str, content: bytes) -> None:
    parts = [(saved.contents.leaves[n], box, named) for n, box, named in saved.rows()]
    listed = {
        layout.part_file(leaf, box): (leaf, box, named) for leaf, box, named in parts
    }
    if file not in listed:
        raise RepairError("was not repaired: its manifest lists no such file")
    leaf, box, named = listed[file]
    if len(content) != layout.stored_bytes(leaf, box):
        raise RepairError(
            f"was not repaired: the copy has {len(content)} bytes, and"
            f" {layout.stored_bytes(leaf, box)} were saved"
        )
    damage = stored_part.damage(np.frombuffer(content, np.uint8), leaf, named)
    if damage is not None:
        raise RepairError(f"was not repaired: the copy {damage}")


def _is_file(root: str, names: Sequence[str]) -> bool:
    # Raises an OSError for a link, or for something else than a file.
    try:
        os.close(no_follow.open_file(os.path.join(root, "hosts"), names))
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return False
    return True
