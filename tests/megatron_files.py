"""Writes Megatron's indexed datasets from its description of the format."""

import struct

import numpy as np

# As Megatron's `DType` numbers them.
CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.uint16: 8}


def write(directory, documents, dtype=np.int32, name="data", gap=0):
    """Writes documents, lists of sequences, as `IndexedDatasetBuilder` does."""
    lengths, offsets, first = [], [], [0]
    content = b""
    for document in documents:
        for sequence in document:
            content += b"\xff" * gap
            offsets.append(len(content))
            lengths.append(len(sequence))
            content += np.asarray(sequence, dtype).tobytes()
        first.append(len(lengths))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1)
    index += struct.pack("<BQQ", CODES[dtype], len(lengths), len(first))
    index += np.array(lengths, np.int32).tobytes()
    index += np.array(offsets, np.int64).tobytes() + np.array(first, np.int64).tobytes()
    (directory / f"{name}.bin").write_bytes(content)
    (directory / f"{name}.idx").write_bytes(index)
    return str(directory / f"{name}.bin")
