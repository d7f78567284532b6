"""Keeps only the steps of one line in the directory that stock Orbax lists.

A line is recorded with its first save, wherever that is, so that it counts for those
who do not see the machines that have it, and if all memory is lost before its first
backup; the worlds of a run that counts them are recorded before they train (see
`claims`). The steps that a line abandons (see `steps.line`) are set aside before its
first step is committed here, and steps that were set aside and are of the line come
back. Where a step lies decides nothing: killed at any point, it can be repeated.
"""

from __future__ import annotations

from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.steps.line import Line
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import claims
from elastic_ckpt.tiers.persistent.persistent_root import (
    PersistentRoot,
    committed_save,
    manifest_names,
)


def record(root: PersistentRoot, line: Line, *, run: str) -> None:
    """Records that `line` was begun, unless a later one was.

    Args:
      root: of the steps.
      line: that the run has begun, whether a step of it is committed or not.
      run: the identity of the run.

    Raises:
      CheckpointError: if storage is unavailable, or a record cannot be read.
      ReplacedError: if another process records a line at the same time.
    """
    recorded = recorded_lines(root, run=run)
    if not any(each.save >= line.save for each in recorded):
        claims.claim(root.path, line, run=run, claimant=claims.new_claimant())


def recorded_lines(root: PersistentRoot, *, run: str) -> list[Line]:
    """The line that was recorded last; none if there was none.

    Raises:
      CheckpointError: if the record cannot be read.
    """
    newest = claims.newest(root.path)
    if newest is None or newest.run != run:
        return []
    return [newest.line]


def arrange(root: PersistentRoot, line: Line, *, run: str, step: int) -> None:
    """Sets aside what `line` abandons, and brings back what is of it.

    Args:
      root: of the steps.
      line: that `step` is committed to.
      run: the identity of the run.
      step: that will be committed; older saves of it are set aside.

    Raises:
      OSError: if storage is unavailable.
      CheckpointError: if it cannot be listed.
    """
    for number in reversed(root.steps()):
        save = save_of(root, number, run=run)
        if save is None or save >= line.save:
            continue
        if number != step and not line.abandons(StepId(number, save)):
            # From here on down it is as the worlds before have arranged it.
            break
        root.set_aside(StepId(number, save))
    for each in root.set_aside_steps():
        is_needed = each.step != step and not line.abandons(each)
        if is_needed and each.save < line.save and not root.is_committed(each.step):
            root.bring_back(each)


def save_of(root: PersistentRoot, step: int, *, run: str) -> str | None:
    """Which save of a step is committed; None if its manifests cannot be read.

    For a step that Orbax alone saved, the save that it counts as.
    """
    directory = root.final(step)
    names = manifest_names(directory)
    if not names:
        return root.foreign_save(step)
    committed = committed_save(directory)
    for name in names:
        try:
            manifest = manifest_file.read(
                directory / name, run=run, step=step, stores=True
            )
        except errors.CheckpointError:
            continue
        if committed in (None, manifest.save):
            return manifest.save
    return None
