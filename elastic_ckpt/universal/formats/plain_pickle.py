"""The plain content of pickles, which `pickle_worker` decodes in a process of its own.

One process serves all threads, a pickle at a time. It starts when the first is decoded,
takes 25 ms to start, and ends when it was idle for some seconds, or this process ends.
Nothing that it answers is a pickle, and what it answers is checked as if it were the
file itself.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import numpy as np

from elastic_ckpt.universal.formats import pickle_worker as answers
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget

# A value of an answer takes so many, with what readers make of it.
_NODE_BYTES = 64
# The process ends when it had nothing to do for so long.
_IDLE_SECS = 10
# The worker was idle for too long, and ended when it was asked. Or the kernel, which
# wakes the reader of a pipe before it signals that bytes came, was so late that the
# worker took the signal for the end of this process.
_UNASKED = (0, -signal.SIGIO)
_MOST_TRIES = 10


class Record(dict[str, Any]):
    """The attributes of an object of a class of another program; nothing else of it."""


def value(
    content: bytes,
    *,
    file: str,
    budget: SourceBudget,
    names: Mapping[str, Any],
    tensor: Callable[[Sequence[Any]], Any],
) -> Any:
    """The value of a pickle.

    Objects become records of their attributes, enumerations their numbers, and classes
    and functions their names.

    Args:
      content: the pickle, and nothing after it.
      file: where it comes from, for messages.
      budget: of its checkpoint.
      names: what some names stand for.
      tensor: makes a tensor of a row: the kind of its storage, its key and elements,
        and its offset, shape, strides, type and view; raises ValueError if it is none.

    Raises:
      FormatError: if it is cut short or malformed, or takes too much memory or time.
    """
    tables, _ = _asked("value", content, file, budget)
    try:
        made = [tensor(row) for row in tables["tensors"]]
    except ValueError as error:
        raise FormatError(f"{file} has an invalid tensor ({error})") from None
    values = _Values(names, made)
    try:
        value = values.of(tables["value"])
    except (IndexError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{file} is malformed ({error!r})") from None
    budget.take(_NODE_BYTES * values.num_nodes, file)
    return value


def metadata(
    content: bytes, *, file: str, budget: SourceBudget
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The tables and columns of a file `.metadata`, see `pickle_worker`.

    Raises:
      FormatError: as `value`, or if it is no such file.
    """
    return _asked("metadata", content, file, budget)


def _asked(
    kind: str, content: bytes, file: str, budget: SourceBudget
) -> tuple[dict[str, Any], list[np.ndarray]]:
    answer = _WORKER.ask(kind, content, budget)
    if answer is None:
        raise FormatError(
            f"{file} has a pickle that takes over {budget.memory_bytes} bytes of"
            " memory, or, with those of the files beside it, over"
            f" {budget.most_secs:.0f} seconds of a processor; it is damaged, or was"
            " made to exhaust them"
        )
    encoded, columns = answer
    tables = json.loads(encoded)
    if "error" in tables:
        raise FormatError(f"{file} {tables['error']}")
    return tables, columns


class _Values:
    """Makes values of the nodes of an answer."""

    def __init__(self, names: Mapping[str, Any], tensors: Sequence[Any]) -> None:
        self._names = names
        self._tensors = tensors
        self.num_nodes = 0

    def of(self, node: Any) -> Any:
        if type(node) is not list:
            return node
        self.num_nodes += len(node)
        kind, *parts = node
        if kind == answers.TENSOR:
            return self._tensors[parts[0]]
        if kind == answers.NAME:
            return self._names.get(parts[0], parts[0])
        if kind == answers.BYTES:
            return parts[0].encode("latin1")
        values = list(map(self.of, parts))
        if kind == answers.TUPLE:
            return tuple(values)
        if kind == answers.SET:
            return set(values)
        if kind in (answers.DICT, answers.RECORD):
            pairs = zip(values[::2], values[1::2], strict=True)
            return dict(pairs) if kind == answers.DICT else Record(pairs)
        return values


class _Worker:
    """The process, which is started when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: IO[bytes] | None = None

    def ask(
        self, kind: str, content: bytes, budget: SourceBudget
    ) -> tuple[bytes, list[np.ndarray]] | None:
        """The content and the columns of an answer.

        Returns:
          None if the process ended before it answered, by its limits.
        """
        with self._lock:
            left_secs = budget.most_secs - budget.secs
            request = {
                "kind": kind,
                "size": len(content),
                "memory": budget.memory_bytes,
                "seconds": round(left_secs),
                "most": budget.most_bytes,
            }
            answer = None
            try:
                for _ in range(_MOST_TRIES if left_secs > 0 else 0):
                    answer = self._asked(request, content)
                    if answer is not None or self._ended() not in _UNASKED:
                        break
            finally:
                if answer is None:
                    self.stop()
            budget.spend(max(0, left_secs) if answer is None else answer[0])
            return answer and answer[1:]

    def _asked(self, request: dict[str, Any], content: bytes) -> Any:
        process = self._running()
        assert process.stdin is not None
        assert self._answers is not None
        for part in (json.dumps(request).encode() + b"\n", content):
            left = memoryview(part)
            try:
                while left:
                    left = left[process.stdin.write(left) :]
            except BrokenPipeError:
                return None
        header = json.loads(self._answers.readline() or b"{}")
        sizes = [header.get("size", 1), *(8 * n for n in header.get("columns", ()))]
        parts = [self._answers.read(size) for size in sizes]
        if list(map(len, parts)) != sizes:
            return None
        columns = [np.frombuffer(each, np.int64) for each in parts[1:]]
        return header["seconds"], parts[0], columns

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", answers.__file__, str(_IDLE_SECS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
            )
            assert self._process.stdout is not None
            descriptor = self._process.stdout.fileno()
            self._answers = open(descriptor, "rb", closefd=False)  # noqa: SIM115
        return self._process

    def _ended(self) -> int | None:
        return None if self._process is None else self._process.wait()

    def stop(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def forget(self) -> None:
        """Leaves the process to the parent of this one, which was forked."""
        self.__init__()


_WORKER = _Worker()
atexit.register(_WORKER.stop)
os.register_at_fork(after_in_child=_WORKER.forget)
