"""Metrics as scalars for TensorBoard; requires the `tensorboard` extra.

A metric's tag is its name, such as `elastic_ckpt/data/wait_secs`. A point is the mean
of a summary's values, usually a single value. The point's step is the number of
completed training steps; in a process that does not record steps, it is the number of
values so far.

Each launch and each world adds a file to the directory. The file begins with a mark
that makes TensorBoard drop points from retrained steps, so that the series continues.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import extras, storage
from elastic_ckpt.monitoring import summaries


def library() -> None:
    """Raises a ConfigError with the extra's name unless `tensorboardX` is installed."""
    _module("event_file_writer")


@contextlib.contextmanager
def event_file(directory: epath.PathLike) -> Iterator[summaries.Write]:
    """A sink that durably adds a point for each summary to an event file.

    Each host needs its own directory. The first batch creates it and the file.

    Raises:
      ConfigError: if the extra is not installed.
    """
    # Not SummaryWriter: its thread and queue would wait forever for a full disk, even
    # when the program exits.
    make_writer = _module("event_file_writer").EventsWriter
    event, proto = _module("proto.event_pb2"), _module("proto.summary_pb2").Summary
    writer: Any = None
    # The number of values so far of each metric.
    counts: collections.Counter[str] = collections.Counter()

    def write(batch: Sequence[summaries.Summary]) -> None:
        nonlocal writer
        if writer is None:
            path = storage.make_directory(directory) / "events"
            writer = make_writer(str(path))
            mark = event.SessionLog(status=event.SessionLog.START)
            # TensorBoard drops points from other launches from this step on.
            first = min((each["step"] for each in batch if "step" in each), default=1)
            writer.write_event(event.Event(step=first, session_log=mark))
        for summary in batch:
            name, count = summary["metric"], summary["count"]
            counts[name] += count
            point = proto.Value(
                tag=name.removeprefix("/"), simple_value=summary["sum"] / count
            )
            writer.write_event(
                event.Event(
                    wall_time=summary["time"],
                    step=summary.get("step", counts[name]),
                    summary=proto(value=[point]),
                )
            )
        writer.flush()

    try:
        yield write
    finally:
        if writer is not None:
            writer.close()


def _module(name: str) -> Any:
    return extras.module(
        f"tensorboardX.{name}",
        extra="tensorboard",
        otherwise="set enable_tensorboard=false",
    )
