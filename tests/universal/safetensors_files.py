"""Checkpoints of safetensors: written without the code under test, and their bits."""

import json
import pathlib

import numpy as np
from etils import epath

from elastic_ckpt.universal.formats import safetensors
from tests.universal.formats import stored_values

# The others are "F32", "I64" and the like.
_NAMES = {"bfloat16": "BF16", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3"}


def write(path, tensors, **metadata):
    """Writes a file of tensors."""
    header, stop = {"__metadata__": metadata} if metadata else {}, 0
    for name, array in tensors.items():
        start, stop = stop, stop + array.nbytes
        dtype = array.dtype
        kind = f"{dtype.kind.upper()}{8 * dtype.itemsize}"
        header[name] = {
            "dtype": _NAMES.get(dtype.name, kind),
            "shape": list(array.shape),
            "data_offsets": [start, stop],
        }
    text = json.dumps(header).encode()
    values = b"".join(array.tobytes() for array in tensors.values())
    epath.Path(path).write_bytes(len(text).to_bytes(8, "little") + text + values)


def read(directory):
    """All tensors of a directory, by name."""
    arrays = {}
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        for tensor in safetensors.read_header(path)[0]:
            arrays[tensor.name] = stored_values.read(tensor)
    return arrays


def bits(arrays):
    """The dtypes, shapes and bytes of arrays, by name."""
    return {
        name: (str(array.dtype), array.shape, np.asarray(array).tobytes())
        for name, array in arrays.items()
    }
