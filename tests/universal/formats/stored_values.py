"""Samples of all formats, and the values at the places that an opener reports."""

import pathlib
import shutil
import tarfile

import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from orbax.checkpoint import v1

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import torch_file
from elastic_ckpt.universal.reading.sources import Checks

DATA = pathlib.Path(__file__).parent / "data"
GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


def sample(name, directory):
    """A good checkpoint of a format, in a new directory of its own."""
    path = directory / name
    if name == "orbax":
        v1.save(path, {"w": jnp.arange(12.0), "v": jnp.ones((2, 2))})
        return path
    for folder in (DATA, GOLDEN):
        if (folder / name).exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            is_file = (folder / name).is_file()
            return (shutil.copy if is_file else shutil.copytree)(folder / name, path)
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as file:
        file.extractall(path.parent, filter="data")
    return path


def read(tensor):
    """The values of a stored tensor; each element is in one fragment."""
    if tensor.spec is not None:
        array = ts.open(dict(tensor.spec), open=True, read=True).result()
        return np.asarray(array.read().result())
    array = np.zeros(tensor.shape, tensor.dtype)
    covered = np.zeros(tensor.shape, np.int8)
    for each in tensor.fragments:
        # NumPy refuses what is not inside of the file.
        content = np.memmap(each.file, np.uint8, "r")
        place = content, each.offset, each.strides
        index = tuple(map(slice, each.box.start, each.box.stop))
        array[index] = np.ndarray(each.box.shape, tensor.dtype, *place)
        covered[index] += 1
    assert (covered == 1).all(), tensor.name
    for each in tensor.view.split():
        array = {"conj": np.conjugate, "neg": np.negative}[each](array)
    return array


def by_key(checkpoint):
    """The tensors of a checkpoint by name, kind and ranks."""
    keyed = {(t.name, t.kind, t.ranks): t for t in checkpoint.tensors}
    assert len(keyed) == len(checkpoint.tensors)
    return keyed


def assert_equal(values, array):
    """Fails unless two arrays have the same type, shape and bits."""
    assert (values.dtype, values.shape) == (array.dtype, array.shape)
    assert values.tobytes() == np.ascontiguousarray(array).tobytes()


def assert_holds(path, arrays):
    """Opens a checkpoint, whose tensors are these arrays by name."""
    checkpoint = opening.open_checkpoint(path)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        assert_equal(read(tensors[name]), array)
    return checkpoint


def without_checksums(checkpoint):
    """Compares all checksums of a checkpoint; returns its files that have none."""
    Checks(checkpoint.checksums, checkpoint.tensors, (0, 1)).finish()
    files = {part.file for each in checkpoint.tensors for part in each.fragments}
    return {file for file in files if not checkpoint.checksums(file)}


def contents(path):
    """All that is read of a checkpoint, after its checksums have been compared."""
    checkpoint = opening.open_checkpoint(path)
    without_checksums(checkpoint)
    held = {key: repr(checkpoint.values[key]) for key in checkpoint.values}
    for key, tensor in by_key(checkpoint).items():
        values = read(tensor)
        held[key] = tensor.dtype.name, tensor.shape, tensor.view, values.tobytes()
    if "forgather" in path.parts:
        paths = sorted(path.glob("*.pt"))
        held |= {each.name: repr(torch_file.read_arrays(each)) for each in paths}
    return held
