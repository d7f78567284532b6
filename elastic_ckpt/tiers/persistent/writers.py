"""The worlds that write into a persistent root, and the leftovers of crashed ones.

Only host 0 of a world commits an upload, so an upload can complete only while that
process is alive. It holds a shared lock on `<root>/writers.lock` from before the first
upload until it ends. A world that starts and finds no other holder removes the
leftovers of all earlier worlds; no other world can start meanwhile.

Object stores have no locks. There the commit of the same step removes what others left
in its directory, and the next removal finishes one that was cut short (see `leases`). A
world that has claimed the run (see `claims`) removes other leftovers to which nothing
was written for half an hour: a replaced start may still upload, but does not commit.
Without claims they stay. `elastic-ckpt inspect` shows them.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading
import time
from collections.abc import Callable, Iterator

from elastic_ckpt.core import bucket_clients, errors, storage
from elastic_ckpt.steps.manifest import Manifest
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent.persistent_root import (
    REMOVED,
    PersistentRoot,
    manifest_names,
    read_manifests,
)
from elastic_ckpt.tiers.source import Leftover

LOCK = "writers.lock"
_CLOSE_SECS = 1.0
# An upload in an object store that was not written to for so long is dead.
_QUIET_SECS = 1800.0
# Those of our worlds (`HostWorld.new_save`); programs with Orbax alone use others.
_SAVE = re.compile(r"\d{15}")
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class WritingWorld:
    """This world among the writers; its host 0 has one.

    Args:
      root: of the steps.
      run: whose steps they are.
    """

    def __init__(self, root: PersistentRoot, *, run: str) -> None:
        self._root = root
        self._run = run
        self._presence: storage.Presence | None = None
        self._lock = threading.RLock()
        self._closed = False

    def be_present(self) -> None:
        """Says that this world writes; to be called before each upload.

        Raises:
          OSError: if storage is unavailable.
        """
        with self._lock:
            is_present = self._presence is not None
            if self._closed or is_present or not storage.is_local(self._root.path):
                return
            try:
                self._presence = storage.Presence(self._root.path / LOCK)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise

    def discard_dead(
        self,
        *,
        before: str,
        is_needed: Callable[[Leftover], bool] = lambda _: False,
        is_claimed: bool = False,
    ) -> list[Leftover]:
        """Removes the leftovers of uploads of crashed worlds.

        Args:
          before: the save of this world; younger leftovers stay.
          is_needed: whether a leftover stays, because its upload can be continued.
          is_claimed: whether this world has claimed the run, so that no other commits.

        Returns:
          The leftovers that were removed.

        Raises:
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        with self._lock:
            if not storage.is_local(self._root.path):
                if self._closed or not is_claimed:
                    return []
                return [
                    self._discard(each)
                    for each in self._root.leftovers()
                    if self._is_quiet(each, before) and not is_needed(each)
                ]
            self.be_present()
            if self._closed or self._presence is None:
                return []
            with self._presence.alone() as alone:
                if not alone:
                    return []
                return [
                    self._discard(each)
                    for each in self._root.leftovers()
                    if each.save == REMOVED
                    or (self._is_older(each, before) and not is_needed(each))
                ]

    def discard_own(self, step_id: StepId) -> list[Leftover]:
        """Removes what uploads of this world that failed left of steps before `step`.

        To be called when no upload of it is running.
        """
        return [
            self._discard(each)
            for each in self._root.leftovers()
            if each.step < step_id.step and self._saves(each) == {step_id.save}
        ]

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """To be held while an upload is committed, so that none is after `close`.

        Raises:
          CheckpointError: if this world writes no more.
        """
        with self._lock:
            if self._closed:
                raise errors.CheckpointError(
                    "the checkpointer was closed before its upload was committed, and"
                    " another world may take what is there for dead; save once more"
                )
            yield

    def close(self) -> None:
        """Says that this world writes no more; waits a little for a commit under way.

        If that takes longer, the mark stays until this process ends.
        """
        is_idle = self._lock.acquire(timeout=_CLOSE_SECS)
        self._closed = True
        if is_idle:
            if self._presence is not None:
                self._presence.close()
            self._lock.release()

    def _discard(self, leftover: Leftover) -> Leftover:
        storage.remove(leftover.path)
        return leftover

    def _is_older(self, leftover: Leftover, before: str) -> bool:
        saves = self._saves(leftover)
        return bool(saves) and all(
            _SAVE.fullmatch(save) and save < before for save in saves
        )

    def _is_quiet(self, leftover: Leftover, before: str) -> bool:
        # A removal that was cut short may have left no manifest.
        if not all(save < before for save in self._saves(leftover)):
            return False
        written = bucket_clients.last_written(str(leftover.path))
        return written is not None and written < time.time() - _QUIET_SECS

    def _saves(self, leftover: Leftover) -> set[str]:
        # If the name does not contain the save, manifests may; otherwise it is unknown.
        if leftover.save is not None:
            return {leftover.save}
        names = manifest_names(leftover.path)
        manifests = read_manifests(
            leftover.path, names, run=self._run, step=leftover.step
        )
        if not all(isinstance(each, Manifest) for each in manifests):
            return set()
        return {each.save for each in manifests if isinstance(each, Manifest)}
