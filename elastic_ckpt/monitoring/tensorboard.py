"""Metrics as scalars for TensorBoard; needs the extra `tensorboard`.

A metric has the tag of its name, `elastic_ckpt/data/wait_secs`. A point is the mean of
the values that a summary stands for, mostly of one, and its step the number of the
values so far: for what is recorded once a step, the steps since this start.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.monitoring import summaries


def library() -> None:
    """Raises a ConfigError that names the extra if `tensorboardX` is not installed."""
    _module("event_file_writer")


class TensorBoard:
    """A sink that writes an event file.

    Args:
      directory: where the file is to be; one of its own for each start and host.

    Raises:
      ConfigError: if the extra is not installed.
    """

    def __init__(self, directory: epath.PathLike) -> None:
        self._directory = directory
        # Not SummaryWriter: its own thread and queue would wait forever for a full
        # disk, at the end of the program too.
        self._make_writer = _module("event_file_writer").EventsWriter
        self._event = _module("proto.event_pb2").Event
        self._summary = _module("proto.summary_pb2").Summary
        self._writer: Any = None

    def write(self, batch: Sequence[summaries.Summary]) -> None:
        """Adds a point for each summary, durably; the first call makes the file."""
        if self._writer is None:
            directory = storage.make_directory(self._directory)
            self._writer = self._make_writer(str(directory / "events"))
        for summary in batch:
            value = self._summary.Value(
                tag=summary.metric.name.removeprefix("/"),
                simple_value=summary.sum / summary.count,
            )
            self._writer.write_event(
                self._event(
                    wall_time=summary.time,
                    step=summary.number,
                    summary=self._summary(value=[value]),
                )
            )
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"tensorboardX.{name}")
    except ImportError as error:
        raise errors.ConfigError(
            f"the package tensorboardx cannot be imported ({error}); install it with"
            " `pip install elastic-ckpt[tensorboard]`, or set enable_tensorboard=false"
        ) from None
