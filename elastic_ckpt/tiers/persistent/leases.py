"""Leases: a step that another program reads is not removed meanwhile.

    <root>/leases/<step>-<holder>.json   a lease of a step, renewed while it is used
    <root>/leases/removing-<save>.json   the steps that the run is about to remove

A reader writes a lease and then looks for its step among those being removed; the run
first writes which steps it removes and then looks for leases. So at least one of them
sees the other, and gives way: the run keeps the step, or the reader takes another one.

Clocks of different machines are never compared. A lease has a duration and a count,
which its holder increases four times in that duration. The run counts a lease as
expired when it has seen the same count for the whole duration by its own clock; the
holder counts it as lost when it could not renew it for the same time by its own. So a
step of a reader that was killed is removed with the first collection that comes one
duration after another one has seen the lease.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Collection, Iterator
from concurrent import futures

from absl import logging
from etils import epath

from elastic_ckpt.core import (
    background,
    bucket_clients,
    checked_json,
    clock,
    errors,
    storage,
)
from elastic_ckpt.steps.line import Line
from elastic_ckpt.tiers.persistent import persistent_root
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot

DIRECTORY = "leases"
DURATION_SECS = 120.0
_VERSION = 1
_SUFFIX = ".json"
_REMOVING = "removing-"
_RENEWALS = 4


class StepGoneError(errors.CheckpointError):
    """The step was removed, or is being removed; there may be a newer one."""


@contextlib.contextmanager
def lease(
    step_path: epath.PathLike, *, duration_secs: float = DURATION_SECS
) -> Iterator[epath.Path]:
    """Keeps a step in storage: its run does not remove it until the block ends.

    Args:
      step_path: the directory of a committed step in persistent storage.
      duration_secs: how long the step is kept, at least, if this process is killed; the
        lease is lost if storage is out of reach for longer.

    Yields:
      The directory of the step.

    Raises:
      StepGoneError: if there is no such step, or it is being removed.
      CheckpointError: when the block ends, if the lease was lost meanwhile, so that
        files may have been removed before they were read.
      OSError: if storage is unavailable; for a bucket, it may be its client's error.
    """
    lease = _Lease(step_path, duration_secs)
    lease.begin()
    try:
        yield lease.directory
    except BaseException:
        lease.end()
        raise
    problem = lease.end()
    if problem is not None:
        raise errors.CheckpointError(
            f"the lease of {lease.directory} was lost while it was read: {problem};"
            " read it again, or a newer step"
        )


@contextlib.contextmanager
def leased_if_ours(path: epath.PathLike) -> Iterator[None]:
    """Leases the step that a path lies in, if a run of this library may remove it.

    Nothing is leased in other checkpoints, or in storage that cannot be written to: the
    latter is logged.

    Args:
      path: of a step in persistent storage or a part of it, or of anything else.

    Raises:
      CheckpointError: as `lease`.
    """
    with contextlib.ExitStack() as stack:
        step_path = _step_of_a_run(storage.absolute(path))
        if step_path is not None:
            try:
                stack.enter_context(lease(step_path))
            except bucket_clients.failures() as error:
                logging.warning(
                    "%s is read without a lease (%s); see that its run does not"
                    " remove it meanwhile",
                    step_path,
                    error,
                )
        yield


@contextlib.contextmanager
def announced(
    root: PersistentRoot, steps: Collection[int], *, by: str
) -> Iterator[set[int]]:
    """Announces the steps that the run is about to remove; leases are read inside.

    Args:
      root: of the steps.
      steps: their numbers.
      by: the save of the world that removes them.

    Yields:
      The steps that earlier worlds have announced, which were killed meanwhile; these
      announcements are removed at the end.
    """
    path = root.path / DIRECTORY / f"{_REMOVING}{by}{_SUFFIX}"
    fields: dict[str, storage.Json] = {"steps": sorted(steps)}
    storage.make_directory(path.parent)
    storage.write_atomic(path, checked_json.to_bytes(fields, version=_VERSION))
    try:
        earlier = [
            name
            for name in _names(root)
            if name.startswith(_REMOVING) and name < path.name
        ]
        yield _announced_in(root, earlier)
        for name in earlier:
            storage.remove(path.parent / name)
    finally:
        storage.remove(path)


@contextlib.contextmanager
def removing(
    root: PersistentRoot, steps: Collection[int], line: Line, *, watch: Watch
) -> Iterator[set[int]]:
    """Announces removals, finishes those of earlier worlds, and yields leased steps.

    Args:
      root: of the steps.
      steps: that are to be removed or moved, unless they are leased.
      line: of the world that does it.
      watch: of the leases.
    """
    with announced(root, steps, by=line.save) as cut_short:
        for number in cut_short:
            if not root.is_committed(number):
                storage.remove(root.final(number))
        yield watch.leased(root)


def arrange(
    root: PersistentRoot, line: Line, *, run: str, step: int, watch: Watch
) -> None:
    """Sets aside what a line abandons, and brings back what is of it.

    An abandoned step that is leased stays where it is until a later commit.

    Args:
      root: of the steps.
      line: that `step` is about to be committed to.
      run: the identity of the run.
      step: that will be committed; older saves of it are set aside.
      watch: of the leases.

    Raises:
      CheckpointError: if an older save of `step` is leased, or storage is out of
        reach.
      OSError: if storage is unavailable.
    """
    misplaced = root.misplaced(line, run=run, step=step)
    if misplaced:
        numbers = {each.step for each in misplaced}
        with removing(root, numbers, line, watch=watch) as leased:
            if step in leased & numbers:
                raise leased_error(root, step)
            for each in misplaced:
                if each.step not in leased:
                    root.set_aside(each)
    root.bring_back(line, step=step)


def leased_error(root: PersistentRoot, step: int) -> errors.CheckpointError:
    """The error of a step that can be neither removed nor replaced."""
    return errors.CheckpointError(
        f"step {step} in {root.path} is leased: a program is reading it; delete or"
        " replace it when that has ended. The lease of a program that was killed"
        " expires by itself"
    )


class Watch:
    """The leases of a run, as the host that removes steps has seen them."""

    def __init__(self) -> None:
        # By name: the content, and when it was first seen.
        self._seen: dict[str, tuple[bytes, float]] = {}

    def leased(self, root: PersistentRoot) -> set[int]:
        """The steps that are leased; files of expired leases are removed.

        Raises:
          CheckpointError: if leases cannot be read, so that nothing may be removed.
        """
        steps = set()
        seen: dict[str, tuple[bytes, float]] = {}
        for name in _names(root):
            number = name.partition("-")[0]
            content = _content(root, name) if number.isdecimal() else None
            if content is None:
                continue
            now = clock.monotonic()
            before, since = self._seen.get(name, (None, now))
            if content != before:
                since = now
            if now - since > _duration_secs(content):
                storage.remove(root.path / DIRECTORY / name)
                continue
            seen[name] = (content, since)
            steps.add(int(number))
        self._seen = seen
        return steps


class _Lease:
    # A lease of this process, which a thread renews.

    def __init__(self, step_path: epath.PathLike, duration_secs: float) -> None:
        if not duration_secs > 0:
            raise errors.ConfigError(
                f"duration_secs={duration_secs!r}: give a positive number of seconds"
            )
        self.directory = storage.absolute(step_path)
        self._root, self._step = _parsed(self.directory)
        self._duration_secs = duration_secs
        holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        name = f"{self._step}-{holder}{_SUFFIX}"
        self._path = self._root.path / DIRECTORY / name
        self._count = 0
        self._renewed_secs = 0.0
        self._problem: str | None = None
        self._ended = threading.Event()
        self._renewing: futures.Future[None] | None = None
        self._save: str | None = None

    def begin(self) -> None:
        storage.make_directory(self._path.parent)
        try:
            self._write()
            if self._step in _being_removed(self._root):
                raise StepGoneError(
                    f"{self.directory} is being removed; take a newer step"
                )
            if not self._is_there():
                raise StepGoneError(
                    f"{self.directory} is not a committed step; name"
                    " PERSISTENT_DIRECTORY/<step>, or take a newer one if it was"
                    " removed"
                )
            self._save = persistent_root.committed_save(self.directory)
        except BaseException:
            with contextlib.suppress(*bucket_clients.failures()):
                storage.remove(self._path)
            raise
        self._renewing = background.in_thread(self._renew, name="lease")

    def end(self) -> str | None:
        # Ends the lease; what happened to it meanwhile, None if it was kept.
        self._ended.set()
        if self._renewing is not None:
            background.wait([self._renewing])
        try:
            if self._problem is None and not self._is_held():
                self._problem = "the step was removed, or saved again"
            storage.remove(self._path)
        except bucket_clients.failures() as error:
            self._problem = self._problem or f"the storage is out of reach ({error})"
        return self._problem

    def _renew(self) -> None:
        while not self._ended.wait(self._duration_secs / _RENEWALS):
            try:
                if not self._path.exists():
                    self._problem = "it was not renewed in time, and it has expired"
                    return
                self._write()
            except bucket_clients.failures() as error:
                logging.warning("the lease %s is not renewed: %s", self._path, error)
            if clock.monotonic() - self._renewed_secs > self._duration_secs:
                self._problem = "it could not be renewed in time"
                return

    def _write(self) -> None:
        fields: dict[str, storage.Json] = {
            "duration_secs": self._duration_secs,
            "count": self._count,
        }
        began_secs = clock.monotonic()
        storage.write_atomic(
            self._path, checked_json.to_bytes(fields, version=_VERSION)
        )
        self._count += 1
        self._renewed_secs = began_secs

    def _is_held(self) -> bool:
        if clock.monotonic() - self._renewed_secs > self._duration_secs:
            return False
        same = persistent_root.committed_save(self.directory) == self._save
        return same and self._path.exists() and self._is_there()

    def _is_there(self) -> bool:
        return self._root.is_committed(self._step)


def _parsed(directory: epath.Path) -> tuple[PersistentRoot, int]:
    # The root and the number of the step in a directory.
    if not directory.name.isdecimal():
        raise StepGoneError(
            f"{directory} is not the directory of a step in persistent storage; name"
            " PERSISTENT_DIRECTORY/<step>"
        )
    return PersistentRoot.from_path(directory.parent), int(directory.name)


def _step_of_a_run(path: epath.Path) -> epath.Path | None:
    # The directory of the step that has `path`, at most a tree in it; None if it has no
    # manifest of ours.
    for directory in (path, path.parent, path.parent.parent):
        if (
            directory.name.isdecimal()
            and directory.is_dir()
            and persistent_root.manifest_names(directory)
        ):
            return directory
    return None


def _being_removed(root: PersistentRoot) -> set[int]:
    return _announced_in(
        root, [name for name in _names(root) if name.startswith(_REMOVING)]
    )


def _announced_in(root: PersistentRoot, names: Collection[str]) -> set[int]:
    steps: set[int] = set()
    for name in names:
        content = _content(root, name)
        if content is not None:
            try:
                fields = checked_json.parse(
                    content, what="announcement of removals", version=_VERSION
                )
            except checked_json.UnreadableError as error:
                raise errors.CheckpointError(
                    f"{root.path / DIRECTORY / name} {error}; remove it if no run"
                    " removes steps now"
                ) from None
            steps.update(fields["steps"])
    return steps


def _duration_secs(content: bytes) -> float:
    try:
        fields = checked_json.parse(content, what="lease", version=_VERSION)
    except checked_json.UnreadableError:
        # Its holder may be alive; it expires like the others.
        return DURATION_SECS
    return float(fields["duration_secs"])


def _names(root: PersistentRoot) -> list[str]:
    directory = root.path / DIRECTORY
    with _within_reach(directory):
        names = storage.names(directory) if directory.exists() else []
    # Others are temporary names.
    return sorted(name for name in names if name[0] != "." and name.endswith(_SUFFIX))


def _content(root: PersistentRoot, name: str) -> bytes | None:
    path = root.path / DIRECTORY / name
    with _within_reach(path), contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return None


@contextlib.contextmanager
def _within_reach(path: epath.Path) -> Iterator[None]:
    try:
        yield
    except bucket_clients.failures() as error:
        raise errors.CheckpointError(
            f"the leases of steps, {path}, are out of reach ({error}); try again when"
            " the storage is back"
        ) from error
