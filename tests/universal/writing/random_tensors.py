"""Random tensors."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

DTYPES = [
    np.dtype(np.float32),
    np.dtype(np.float64),
    np.dtype(np.int64),
    np.dtype(np.uint8),
    np.dtype(np.bool_),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn),
]


@st.composite
def tensors(draw, most=6):
    """Tensors by name, of all bit patterns."""
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=most))
    made = {}
    for name in dict.fromkeys(names):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        dtype = draw(st.sampled_from(DTYPES))
        generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        content = generator.bytes(int(np.prod(shape)) * dtype.itemsize)
        if dtype.kind == "b":
            content = bytes(byte % 2 for byte in content)
        made[name] = np.frombuffer(content, dtype).reshape(shape)
    return made
