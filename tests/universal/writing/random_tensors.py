"""Random tensors, and ways to cut them into boxes."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from elastic_ckpt.core import boxes
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.writing import safetensors_plan

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


def cut(shape, generator):
    """Boxes that cover each element of a tensor once."""
    whole = [boxes.whole(shape)]
    for _ in range(generator.integers(0, 6)):
        box = whole.pop(int(generator.integers(len(whole))))
        dims = [dim for dim, size in enumerate(box.shape) if size > 1]
        if not dims:
            return [*whole, box]
        dim = dims[int(generator.integers(len(dims)))]
        at = int(generator.integers(box.start[dim] + 1, box.stop[dim]))
        low, high = list(box.stop), list(box.start)
        low[dim] = high[dim] = at
        whole += [
            boxes.Box(start=box.start, stop=tuple(low)),
            boxes.Box(start=tuple(high), stop=box.stop),
        ]
    return whole


def reader(arrays, seed=0, *, transposed=False):
    """Yields the boxes of tensors in a random order."""

    def read(names):
        generator = np.random.default_rng(seed)
        listed = [
            (name, box)
            for name in names
            for box in cut(arrays[name].shape, generator)
            if box.volume
        ]
        for number in generator.permutation(len(listed)):
            name, box = listed[number]
            values = arrays[name][tuple(map(slice, box.start, box.stop))]
            yield name, box, values.copy("F" if transposed else "C")

    return read


def plan_of(arrays, **options):
    return safetensors_plan.plan(
        [
            TargetTensor(name=name, dtype=a.dtype, shape=a.shape)
            for name, a in arrays.items()
        ],
        **options,
    )
