"""Reads what TensorBoard would: the scalars of event files, with their checksums."""

import pathlib
import struct
from collections.abc import Iterator

from tensorboardX.proto import event_pb2

from tests import tfrecord_files


def scalars(directory: pathlib.Path) -> list[tuple[str, int, float]]:
    """Tag, step and value of each point below `directory`."""
    return [
        (value.tag, event.step, value.simple_value)
        for event in _events(directory)
        for value in event.summary.value
    ]


def marks(directory: pathlib.Path) -> list[int]:
    """The steps from which TensorBoard drops the points before each mark."""
    start = event_pb2.SessionLog.START
    return [e.step for e in _events(directory) if e.session_log.status == start]


def _events(directory: pathlib.Path) -> Iterator[event_pb2.Event]:
    for file in sorted(directory.rglob("*.tfevents.*")):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack_from("<Q", content)
            record = content[12 : 12 + length]
            framed = tfrecord_files.framed(record)
            assert content.startswith(framed)
            content = content[len(framed) :]
            yield event_pb2.Event.FromString(record)
