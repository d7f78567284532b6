"""Leases: a run does not remove a step while another program reads it.

    <root>/leases/<step>-<start>.json       a lease: a record (see `records`)
    <root>/leases/<step>-<save>.removing    the run is about to remove the step

A reader first writes a lease, then checks whether its step is being removed. The run
first announces which steps it removes or sets aside, then checks for leases. So at
least one of them sees the other and yields: the run keeps the step, or the reader
chooses a different one.

If a reader is killed, the first collection that finds its lease unchanged for the
lease's full duration can remove the step. If the reader ran on the run's machine, the
next collection can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from absl import logging
from etils import epath

from elastic_ckpt.core import bucket_clients, clock, errors, process, storage
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.persistent import records
from elastic_ckpt.tiers.persistent.persistent_root import (
    PersistentRoot,
    committed,
    manifest_names,
)

DIRECTORY = "leases"
DURATION_SECS = 120.0
_LEASE, _REMOVING = ".json", ".removing"
# When the host that removes steps first saw each lease, by path and renewal count.
Watch = dict[tuple[epath.Path, int], float]


class StepGoneError(errors.CheckpointError):
    """The step was or is being removed; there may be a newer one."""


@contextlib.contextmanager
def lease(
    step_path: epath.PathLike, *, duration_secs: float = DURATION_SECS
) -> Iterator[epath.Path]:
    """Keeps a step in storage: the step's run does not remove it until the block ends.

    Args:
      step_path: a committed step directory in persistent storage.
      duration_secs: the minimum time, in seconds, that the step is kept if this process
        is killed. The lease is lost if storage is unreachable for longer.

    Yields:
      The step directory.

    Raises:
      StepGoneError: if the step does not exist or is being removed.
      CheckpointError: if the lease was lost; raised at the end of the block, because
        files may have been removed before they were read.
      OSError: if storage is unavailable; for a bucket, its client's own error may be
        raised instead.
    """
    if not duration_secs > 0:
        raise errors.ConfigError(
            f"duration_secs={duration_secs!r}: pass a positive number of seconds"
        )
    directory = storage.absolute(step_path)
    root = PersistentRoot.from_path(directory.parent)
    gone = StepGoneError(
        f"{directory} is not a committed step, or is being removed; pass"
        " PERSISTENT_DIRECTORY/<step>, or choose a newer step"
    )
    if not directory.name.isdecimal():
        raise gone
    step, start = int(directory.name), records.new_start()
    record = records.Record(start=start, process=process.this(), secs=duration_secs)
    path = root.path / DIRECTORY / f"{step}-{start}{_LEASE}"
    storage.write_atomic(path, records.to_bytes(record))
    held = records.Held(path, record)
    try:
        if step in _files(root, _REMOVING).values() or not root.is_committed(step):
            raise gone
        commit = committed(directory)
        yield directory
        is_kept = False
        with contextlib.suppress(records.OutOfReachError, *bucket_clients.failures()):
            is_kept = (
                held.check()
                and root.is_committed(step)
                and commit == committed(directory)
            )
    finally:
        held.remove()
    if not is_kept:
        raise errors.CheckpointError(
            f"the lease of {directory} was lost during the read: it was not renewed"
            " in time, the step was removed or saved again, or storage is unreachable;"
            " read the step again, or read a newer step"
        )


@contextlib.contextmanager
def leased_if_ours(path: epath.PathLike) -> Iterator[None]:
    """Leases the step that contains a path, if a run of this library may remove it.

    Does nothing for other checkpoints and, with a warning, in read-only storage.

    Args:
      path: a step in persistent storage, a part of a step, or any other path.

    Raises:
      CheckpointError: see `lease`.
    """
    given = storage.absolute(path)
    ours = [
        each
        for each in (given, given.parent, given.parent.parent)
        if each.name.isdecimal() and each.is_dir() and manifest_names(each)
    ]
    with contextlib.ExitStack() as stack:
        for directory in ours[:1]:
            try:
                stack.enter_context(lease(directory))
            except bucket_clients.failures() as error:
                logging.warning(
                    "%s is read without a lease (%s); make sure that its run does not"
                    " remove it during the read",
                    directory,
                    error,
                )
        yield


def leased(root: PersistentRoot, watch: Watch) -> set[int]:
    """The leased steps; removes leases that have lapsed.

    Raises:
      CheckpointError: if a lease cannot be read; in that case, no step may be removed.
    """
    files, before = _files(root, _LEASE), dict(watch)
    watch.clear()
    for path in files:
        record = records.read(path)
        if record is None:
            continue
        now_secs, seen = clock.monotonic(), (path, record.count)
        since_secs = before.get(seen, now_secs)
        if record.process.is_dead or now_secs - since_secs > record.secs:
            storage.remove(path)
        else:
            watch[seen] = since_secs
    return {files[path] for path, _ in watch}


@contextlib.contextmanager
def removing(
    root: PersistentRoot,
    steps: Collection[int],
    line: Line,
    *,
    watch: Watch,
    replaced: int | None = None,
) -> Iterator[set[int]]:
    """Announces removals, finishes earlier worlds' removals, and yields leased steps.

    Args:
      root: the directory of the steps.
      steps: the steps to remove or move, unless they are leased.
      line: the line of the world that removes the steps.
      watch: the leases seen so far.
      replaced: a step among `steps` that must be removed.

    Raises:
      CheckpointError: if `replaced` is leased, or leases cannot be read.
    """
    names = [f"{step}-{line.save}{_REMOVING}" for step in steps]
    own = [root.path / DIRECTORY / name for name in names]
    for path in own:
        storage.write_atomic(path, b"")
    try:
        for path, step in _files(root, _REMOVING).items():
            # A killed world left this file.
            if path.stem.partition("-")[2] < line.save:
                if not root.is_committed(step):
                    storage.remove(root.final(step))
                storage.remove(path)
        are_leased = leased(root, watch)
        if replaced in are_leased:
            raise errors.CheckpointError(
                f"step {replaced} in {root.path} is leased: a program is reading it;"
                " delete or replace the step when that program has exited. If the"
                " program was killed, its lease expires on its own"
            )
        yield are_leased
    finally:
        for path in own:
            storage.remove(path)


def arrange(
    root: PersistentRoot, line: Line, *, run: str, step: int, watch: Watch
) -> None:
    """Sets aside the steps that a line abandons and moves the line's own steps back.

    A leased abandoned step stays where it is until a later commit.

    Args:
      root: the directory of the steps.
      line: the line that `step` is about to be committed to.
      run: the identity of the run.
      step: the step to commit; its older saves are set aside.
      watch: the leases seen so far.

    Raises:
      CheckpointError: if an older save of `step` is leased, or storage is unreachable.
      OSError: if storage is unavailable.
    """
    saves = root.of_each(lambda number: root.save_of(number, run=run), root.steps())
    older = [
        StepId(number, save)
        for number, save in saves.items()
        if save is not None and save < line.save
    ]
    misplaced = [each for each in older if each.step == step or line.abandons(each)]
    if misplaced:
        numbers = {each.step for each in misplaced}
        with removing(root, numbers, line, watch=watch, replaced=step) as kept:
            for each in reversed(misplaced):
                if each.step not in kept:
                    root.move(root.final(each.step), root.aside(each))
    for each in root.set_aside_steps():
        is_of_line = each.save < line.save and not line.abandons(each)
        if is_of_line and each.step != step and not root.is_committed(each.step):
            root.move(root.aside(each), root.final(each.step))


def _files(root: PersistentRoot, kind: str) -> dict[epath.Path, int]:
    # A kind's files, with their steps. Temporary names begin with a dot.
    directory = root.path / DIRECTORY
    return {
        directory / name: int(name.partition("-")[0])
        for name in sorted(records.names(directory))
        if name[0].isdecimal() and name.endswith(kind)
    }
