"""Small training files."""

import pathlib

from array_record.python import array_record_module


def write_texts(path: pathlib.Path, *, num_texts: int) -> str:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for number in range(num_texts):
        writer.write(b"text %d " % number * 5)
    writer.close()
    return str(path)
