"""A conversion to DeepSpeed's universal format; see `universal_folder`.

Targets are named by kind and parameter: `master/1.mlp.weight`, `first_moment/...`,
`second_moment/...`, `step/...`. Their files are written into a directory beside the
final one, and read back. When all are complete, it is renamed:

    <directory>.unfinished-<source>/global_step300/zero/1.mlp.weight/fp32.pt

The name has a digest of source and rules. If a process was killed, the write is
repeated, and files with right checksums are kept. Memory: as other conversions, or for
each thread the largest parameter.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core import bucket_clients, errors, storage
from elastic_ckpt.universal.deepspeed_layout import described_layout
from elastic_ckpt.universal.formats import torch_file
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.writing import chunks
from elastic_ckpt.universal.writing.conversion import (
    BUDGET_BYTES,
    REUSED_BYTES,
    Conversion,
    Needed,
)
from elastic_ckpt.universal.writing.destination import Progress
from elastic_ckpt.universal.writing.universal_folder import UniversalFolder

_MASTER, _STEP = "master", "step"
_MOMENTS = ("first_moment", "second_moment")
# Kinds that DeepSpeed does not restore from such checkpoints.
_OTHERS = ("parameter", "buffer")
# Places of the step in sources that have no tensor of it.
_STEP_VALUES = ("global_steps", "iteration")
_THREADS = 2


class DeepSpeedDestination:
    """See `destination.Destination`.

    Args:
      conversion: that is planned.

    Raises:
      CheckpointError: if the directory is in a bucket, or a target is no state of an
        optimizer.
    """

    def __init__(self, conversion: Conversion) -> None:
        target = conversion.job.target
        if not storage.is_local(target):
            raise errors.CheckpointError(
                f"{target} is not a local directory, from which DeepSpeed reads its"
                " checkpoints; convert to one, and copy it"
            )
        self._conversion = conversion
        self._final = storage.absolute(target)
        self._prefix = f"{self._final.name}.unfinished-"
        name = self._prefix + conversion.identity[:16]
        self._unfinished = self._final.parent / name
        self._kinds: dict[str, set[str]] = {}
        for each in conversion.targets:
            kind, parameter = _parts(each)
            self._kinds.setdefault(parameter, set()).add(kind)
            # Refuses names that cannot be those of files.
            self._folder("plan").path(parameter, kind)
        lacking = [name for name, held in self._kinds.items() if _MASTER not in held]
        if lacking:
            raise errors.CheckpointError(
                f"{len(lacking)} parameters have no {_MASTER}/<parameter>"
                f" ({errors.first_of(lacking)}), from which DeepSpeed restores weights;"
                " add them to the layout"
            )

    def prepare(self) -> str:
        """See `Destination`; the attempt is the tag of the checkpoint."""
        if self._final.exists():
            raise errors.CheckpointError(
                f"{self._final} exists already; remove it, or give another directory"
            )
        tag = f"global_step{self._step()}"
        if self._final.parent.exists():
            for child in self._final.parent.iterdir():
                if child.name.startswith(self._prefix) and child != self._unfinished:
                    storage.remove(child)
        return tag

    def needed(self, host: int, num_hosts: int) -> Needed:
        """See `Destination`."""
        return _shares(self._conversion.targets, num_hosts)[host]

    def write(
        self, attempt: str, host: int, num_hosts: int, progress: Progress
    ) -> None:
        """See `Destination`."""
        writing = _Writing(
            conversion=self._conversion,
            folder=self._folder(attempt),
            facts=self._facts,
            progress=progress,
        )
        try:
            # The first process has those without elements, too.
            empty = (
                [] if host else [t for t in self._conversion.targets if _is_empty(t)]
            )
            writing.write([*self.needed(host, num_hosts), *empty])
        except bucket_clients.failures() as error:
            raise self._storage_error(error) from error

    def commit(self, attempt: str, num_hosts: int) -> None:
        """See `Destination`."""
        del num_hosts
        folder = self._folder(attempt)
        missing = [
            each.name
            for each in self._conversion.targets
            if not _path(folder, each).exists()
        ]
        if missing:
            raise errors.CheckpointError(
                f"{self._unfinished} cannot be committed: it lacks {len(missing)}"
                f" tensors ({errors.first_of(missing)}); convert again, the others are"
                " kept"
            )
        step = self._step()
        try:
            for parameter, kinds in self._kinds.items():
                if kinds.intersection(_MOMENTS) and _STEP not in kinds:
                    folder.write(parameter, _STEP, np.array(step, np.float32))
                # DeepSpeed would read the temporary files of killed processes.
                for child in folder.path(parameter, _MASTER).parent.iterdir():
                    if child.name.startswith("."):
                        storage.remove(child)
            folder.commit(step=step)
            storage.rename(self._unfinished, self._final)
        except bucket_clients.failures() as error:
            raise self._storage_error(error) from error

    def _folder(self, tag: str) -> UniversalFolder:
        return UniversalFolder(self._unfinished, tag=tag)

    @functools.cached_property
    def _facts(self) -> Mapping[str, Mapping[str, Any]]:
        # Names that a layout gives are not those of the source.
        if self._conversion.job.rules is not None:
            return {}
        return described_layout.facts(self._conversion.checkpoint)

    def _step(self) -> int:
        targets = self._conversion.targets
        steps = [each for each in targets if _parts(each)[0] == _STEP]
        if steps:
            (needed,) = _shares(steps[:1], 1)
            ((_, _, values),) = self._conversion.read(needed, memory=ReusedMemory(0))
            return int(values.flat[0])
        for key in _STEP_VALUES:
            value = self._conversion.checkpoint.values.get(key)
            if type(value) is int:
                return value
        if any(kinds.intersection(_MOMENTS) for kinds in self._kinds.values()):
            raise errors.CheckpointError(
                f"{self._conversion.job.source} has moments, and no step of the"
                f" optimizer; add {_STEP}/<parameter> to the layout"
            )
        return 0

    def _storage_error(self, error: Exception) -> errors.CheckpointError:
        return errors.CheckpointError(
            f"{self._final} cannot be written ({error}); make room or give access, and"
            " convert again: files that are complete are kept"
        )


class _Writing:
    """Writes the files of targets, in a few threads."""

    def __init__(
        self,
        *,
        conversion: Conversion,
        folder: UniversalFolder,
        facts: Mapping[str, Mapping[str, Any]],
        progress: Progress,
    ) -> None:
        self._conversion = conversion
        self._folder = folder
        self._facts = facts
        self._progress = progress
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._done = 0
        self._total = 0

    def write(self, targets: list[TargetTensor]) -> None:
        self._total = sum(target.num_bytes for target in targets)
        left = []
        for target in targets:
            if _is_complete(_path(self._folder, target)):
                self._done += target.num_bytes
            elif _is_empty(target):
                self._write_file(target, np.empty(target.shape, target.dtype))
            else:
                left.append(target)
        self._progress(self._done, self._total)
        with futures.ThreadPoolExecutor(
            _THREADS, thread_name_prefix="deepspeed"
        ) as pool:
            shares = _shares(left, _THREADS)
            waiting = [pool.submit(self._write_share, share) for share in shares]
            try:
                for each in futures.as_completed(waiting):
                    each.result()
            except BaseException:
                self._stopped.set()
                raise

    def _write_share(self, share: Needed) -> None:
        targets = {target.name: target for target in share}
        budget_bytes = BUDGET_BYTES // _THREADS
        memory = ReusedMemory(REUSED_BYTES // _THREADS)
        with contextlib.closing(
            self._conversion.read(share, budget_bytes=budget_bytes, memory=memory)
        ) as read:
            for name, _, values in read:
                if self._stopped.is_set():
                    return
                self._write_file(targets[name], values)
                # The file has the values.
                memory.give_back(values)

    def _write_file(self, target: TargetTensor, values: np.ndarray) -> None:
        kind, parameter = _parts(target)
        facts = self._facts.get(parameter)
        self._folder.write(parameter, kind, values, facts=facts)
        with self._lock:
            self._done += values.nbytes
            self._progress(self._done, self._total)


def _parts(target: TargetTensor) -> tuple[str, str]:
    # The kind and the parameter.
    kind, _, parameter = target.name.partition("/")
    if not parameter or kind in _OTHERS:
        raise errors.CheckpointError(
            f"{target.name!r} is no state that DeepSpeed restores; have the layout name"
            f" targets {_MASTER}/<parameter>, {_MOMENTS[0]}/<parameter>,"
            f" {_MOMENTS[1]}/<parameter> and {_STEP}/<parameter>, and drop others"
        )
    return kind, parameter


def _path(folder: UniversalFolder, target: TargetTensor) -> epath.Path:
    kind, parameter = _parts(target)
    return folder.path(parameter, kind)


def _is_complete(path: epath.Path) -> bool:
    # Whether a file of an earlier attempt is there, with the right checksums.
    try:
        return path.exists() and torch_file.verify(str(path))
    except (FormatError, OSError):
        return False


def _is_empty(target: TargetTensor) -> bool:
    return math.prod(target.shape) == 0


def _shares(targets: list[TargetTensor], count: int) -> list[Needed]:
    # Whole targets, each in one share.
    shape_of = {target.name: target.shape for target in targets}
    return list(chunks.shares(targets, shape_of, count))
