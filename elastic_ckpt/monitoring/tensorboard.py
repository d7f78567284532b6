"""Metrics as scalars for TensorBoard; needs the extra `tensorboard`.

A metric's tag is its name, `elastic_ckpt/data/wait_secs`. A point is the mean of the
values of a summary, usually a single one. Its step is the number of training steps
done, or in a process that does not record that the number of values so far.

Each start, and each world, adds a file to the directory. It begins with a mark that has
TensorBoard drop the points of steps which are trained again, so the series goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import extras, storage
from elastic_ckpt.monitoring import summaries


def library() -> None:
    """Raises a ConfigError with the extra's name unless `tensorboardX` is installed."""
    _module("event_file_writer")


class TensorBoard:
    """A sink that writes an event file.

    Args:
      directory: the directory of the file, different for each host.

    Raises:
      ConfigError: if the extra is not installed.
    """

    def __init__(self, directory: epath.PathLike) -> None:
        self._directory = directory
        # SummaryWriter is not used: its thread and queue would wait forever for a full
        # disk, even at the end of the program.
        self._make_writer = _module("event_file_writer").EventsWriter
        self._event = _module("proto.event_pb2").Event
        self._session_log = _module("proto.event_pb2").SessionLog
        self._summary = _module("proto.summary_pb2").Summary
        self._writer: Any = None

    def write(self, batch: Sequence[summaries.Summary]) -> None:
        """Adds a point for each summary, durably; the first call creates the file."""
        if self._writer is None:
            directory = storage.make_directory(self._directory)
            self._writer = self._make_writer(str(directory / "events"))
            first = min(map(_step, batch))
            mark = self._session_log(status=self._session_log.START)
            self._writer.write_event(self._event(step=first, session_log=mark))
        for summary in batch:
            value = self._summary.Value(
                tag=summary.metric.removeprefix("/"),
                simple_value=summary.sum / summary.count,
            )
            self._writer.write_event(
                self._event(
                    wall_time=summary.time,
                    step=_step(summary),
                    summary=self._summary(value=[value]),
                )
            )
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


def _step(summary: summaries.Summary) -> int:
    return summary.number if summary.step is None else summary.step


def _module(name: str) -> Any:
    return extras.module(
        f"tensorboardX.{name}",
        extra="tensorboard",
        otherwise="set enable_tensorboard=false",
    )
