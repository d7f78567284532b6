"""The worlds that write into a persistent root, and the leftovers of crashed ones.

Only host 0 of a world commits an upload, so an upload can complete only while that
process is alive. It holds a shared lock on `<root>/writers.lock` from before the first
upload until it ends. A world that starts and finds no other holder removes the
leftovers of all earlier worlds; no other world can start meanwhile.

Object stores have no locks. There this removes nothing: a new upload of the same step
clears its directory, and `elastic-ckpt inspect` shows the rest.
"""

from __future__ import annotations

import contextlib
import errno
import re
import threading
from collections.abc import Callable, Iterator

from elastic_ckpt.core import errors, storage
from elastic_ckpt.manifests.manifest import Manifest
from elastic_ckpt.tiers.persistent.persistent_root import (
    REMOVED,
    PersistentRoot,
    manifest_names,
    read_manifests,
)
from elastic_ckpt.tiers.source import Leftover

LOCK = "writers.lock"
_CLOSE_SECS = 1.0
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
        self, *, before: str, is_needed: Callable[[Leftover], bool] = lambda _: False
    ) -> list[Leftover]:
        """Removes the leftovers of uploads of crashed worlds.

        Args:
          before: the save of this world; younger leftovers stay.
          is_needed: whether a leftover stays, because its upload can be continued.

        Returns:
          The leftovers that were removed.
        """
        with self._lock:
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

    def discard_own(self, step: int, save: str) -> list[Leftover]:
        """Removes what uploads of this world that failed left of steps before `step`.

        To be called when no upload of it is running.
        """
        return [
            self._discard(each)
            for each in self._root.leftovers()
            if each.step < step and self._saves(each) == {save}
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
