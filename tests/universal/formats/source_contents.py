"""Samples of all formats, and all that this library reads of a checkpoint."""

import contextlib
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1

from elastic_ckpt.core import boxes
from elastic_ckpt.core.errors import CheckpointError
from elastic_ckpt.integrations.forgather import Checkpoint
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.new_moves import Matched, Move, Side, TargetTensor
from elastic_ckpt.universal.reading.engine import Reader
from tests.universal.formats import stored_values
from tests.universal.formats.test_safetensors import indexed

DATA = pathlib.Path(__file__).parent / "data"
# The user's target gives the size of what is read; samples are small.
MOST_READ_BYTES = 1 << 20


def sample(name, directory):
    """A good checkpoint of a format."""
    path = directory / name
    if name == "orbax":
        v1.save(path, {"w": jnp.arange(12.0), "v": jnp.ones((2, 2))})
    elif name == "safetensors":
        path.mkdir()
        indexed(path)
    elif (DATA / name).exists():
        shutil.copytree(DATA / name, path)
    elif (stored_values.GOLDEN / name).exists():
        shutil.copytree(stored_values.GOLDEN / name, path)
    else:
        path = stored_values.unpacked(f"{name}.tar.xz", directory)
    return path


def contents(path):
    """All that a checkpoint has: bytes of tensors and texts of values.

    Keys of tensors begin with "tensor" and have their dtype and shape at the end.
    """
    checkpoint = opening.open_checkpoint(path)
    held = {
        ("value", name): repr(checkpoint.values[name]) for name in checkpoint.values
    }
    if "forgather" in path.parts:
        held |= _of_forgather(path)
    return held | dict(_of_tensors(checkpoint))


def problem_of(path):
    """The error of a checkpoint when all of it is read; None if it has none."""
    try:
        contents(path)
    except CheckpointError as error:
        return str(error)
    return None


def key_of(tensor):
    """The key of a tensor among the contents."""
    place = tensor.name, tensor.kind, tensor.ranks
    return "tensor", *place, tensor.dtype.name, tensor.shape


def _of_tensors(checkpoint):
    files = {each.file for t in checkpoint.tensors for each in t.fragments}
    checkpoint.check(sorted(files))
    moves, targets = [], {}
    for number, tensor in enumerate(checkpoint.tensors):
        dims = tuple(range(len(tensor.shape)))
        if np.prod(tensor.shape, dtype=float) > MOST_READ_BYTES:
            continue
        place = Side(start=(0,) * len(dims), dims=dims, steps=(1,) * len(dims))
        target = TargetTensor(name=str(number), dtype=tensor.dtype, shape=tensor.shape)
        targets[target.name] = target
        moves.append(
            Move(
                target=target.name,
                sizes=tensor.shape,
                target_side=place,
                source=number,
                source_side=place,
            )
        )
    matched = Matched(moves=moves, derived=[], fills=[], targets=targets, rules=[])
    reader = Reader(checkpoint, matched, targets, budget_bytes=1 << 24)
    units = [(each, [boxes.whole(each.shape)]) for each in targets.values()]
    with contextlib.closing(reader.read(units)) as groups:
        for group in groups:
            for buffer in group:
                key = key_of(checkpoint.tensors[int(buffer.target.name)])
                yield key, buffer.values.tobytes()


def _of_forgather(path):
    checkpoint = Checkpoint.open(path)
    for key in checkpoint.components:
        yield from _of_value(("state", key), checkpoint.states(key))


def _of_value(keys, value):
    if isinstance(value, np.ndarray):
        yield ("tensor", *keys, value.dtype.name, value.shape), value.tobytes()
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _of_value((*keys, key), each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _of_value((*keys, number), each)
    else:
        yield ("value", *keys), repr(value)
