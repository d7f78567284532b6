"""Reads what TensorBoard would: the scalars of event files, with their checksums."""

import pathlib
import struct
from collections.abc import Iterator

import google_crc32c
from tensorboardX.proto import event_pb2


def scalars(directory: pathlib.Path) -> list[tuple[str, int, float]]:
    """Tag, step and value of each point below `directory`."""
    return [
        (value.tag, event.step, value.simple_value)
        for event in _events(directory)
        for value in event.summary.value
    ]


def marks(directory: pathlib.Path) -> list[int]:
    """The steps from which TensorBoard drops the points before each mark."""
    return [
        event.step
        for event in _events(directory)
        if event.session_log.status == event_pb2.SessionLog.START
    ]


def _events(directory: pathlib.Path) -> Iterator[event_pb2.Event]:
    for file in sorted(directory.rglob("*.tfevents.*")):
        yield from map(event_pb2.Event.FromString, _records(file.read_bytes()))


def _records(content: bytes) -> list[bytes]:
    actual, place = [], 0
    while place < len(content):
        length, of_length = struct.unpack_from("<QI", content, place)
        assert of_length == _masked_crc(content[place : place + 8])
        record = content[place + 12 : place + 12 + length]
        place += 16 + length
        assert struct.unpack_from("<I", content, place - 4)[0] == _masked_crc(record)
        actual.append(record)
    return actual


def _masked_crc(content: bytes) -> int:
    crc = google_crc32c.value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
