"""Reads what TensorBoard would: the scalars of event files, with their checksums."""

import pathlib
import struct

import google_crc32c
from tensorboardX.proto import event_pb2


def scalars(directory: pathlib.Path) -> list[tuple[str, int, float]]:
    """Tag, step and value of each point below `directory`."""
    points = []
    for file in sorted(directory.rglob("*.tfevents.*")):
        for record in _records(file.read_bytes()):
            event = event_pb2.Event.FromString(record)
            points += [
                (value.tag, event.step, value.simple_value)
                for value in event.summary.value
            ]
    return points


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
