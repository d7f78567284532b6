"""Reads tensors at the places that an opener reports, with NumPy alone."""

import pathlib
import tarfile

import numpy as np

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


def unpacked(archive, folder):
    """The directory that an archive of `tests/golden` holds."""
    with tarfile.open(GOLDEN / archive) as file:
        file.extractall(folder, filter="data")
    return folder / pathlib.Path(archive).name.removesuffix(".tar.xz")


def read(tensor):
    """The values of a stored tensor; each element is in one fragment."""
    array = np.zeros(tensor.shape, tensor.dtype)
    covered = np.zeros(tensor.shape, np.int8)
    for fragment in tensor.fragments:
        content = np.memmap(fragment.file, np.uint8, "r")
        shape, width = fragment.box.shape, tensor.dtype.itemsize
        last = sum((n - 1) * s for n, s in zip(shape, fragment.strides, strict=True))
        span = content[fragment.offset : fragment.offset + last + width]
        assert len(span) == last + width, "outside of the file"
        view = np.lib.stride_tricks.as_strided(
            np.frombuffer(span.tobytes(), tensor.dtype), shape, fragment.strides
        )
        pairs = zip(fragment.box.start, fragment.box.stop, strict=True)
        index = tuple(slice(start, stop) for start, stop in pairs)
        array[index] = view
        covered[index] += 1
    assert (covered == 1).all(), tensor.name
    return array


def by_key(checkpoint):
    """The tensors of a checkpoint by name, kind and ranks."""
    keyed = {(t.name, t.kind, t.ranks): t for t in checkpoint.tensors}
    assert len(keyed) == len(checkpoint.tensors)
    return keyed
