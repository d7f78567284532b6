"""Keeps the directory of steps as stock Orbax should see it: the steps of one line.

Steps that a line abandons (see `tiers.line`) are set aside before its first step is
committed, and steps that were set aside and are of the line come back. Where a step
lies decides nothing: killed at any point, it can be repeated, and until the new line
has a step somewhere, the old one is found wherever it lies.
"""

from __future__ import annotations

from elastic_ckpt.core import errors
from elastic_ckpt.tiers import manifest_file
from elastic_ckpt.tiers.line import Line
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot, manifest_names


def arrange(root: PersistentRoot, line: Line, *, run: str, step: int) -> None:
    """Sets aside what `line` abandons, and brings back what is of it.

    Args:
      root: of the steps.
      line: that `step` is committed to.
      run: the identity of the run.
      step: that will be committed; older saves of it are set aside.

    Raises:
      OSError: if storage is away.
      CheckpointError: if it cannot be listed.
    """
    for number in reversed(root.steps()):
        save = save_of(root, number, run=run)
        if save is None or save >= line.save:
            continue
        if number != step and not line.abandons(number, save):
            # From here on down it is as the worlds before have arranged it.
            break
        root.set_aside(number, save)
    for number, save in root.set_aside_steps():
        is_needed = number != step and not line.abandons(number, save)
        if is_needed and save < line.save and not root.is_committed(number):
            root.bring_back(number, save)


def save_of(root: PersistentRoot, step: int, *, run: str) -> str | None:
    """Which save of a step is committed; None if its manifests cannot be read.

    Of a step that Orbax alone saved it is the save that it counts as.
    """
    directory = root.final(step)
    names = manifest_names(directory)
    if not names:
        return root.foreign_save(step)
    for name in names:
        try:
            return manifest_file.read(directory / name, run=run, step=step).save
        except errors.CheckpointError:
            continue
    return None
