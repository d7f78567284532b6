"""Files written without torch are those that `torch.load` reads, bit-equal."""

import pathlib
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import torch_file as reading
from elastic_ckpt.universal.writing import direct_io, torch_file

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.int32)
DTYPES += (np.int16, np.int8, np.uint8, np.bool_, np.complex64, np.complex128)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=4).map(tuple),
        # Keys of over 64 bits are refused.
        st.dictionaries(
            st.text(max_size=4) | st.integers(-(2**63), 2**63), inside, max_size=3
        ),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3, 5)])
def test_arrays_of_every_dtype_are_read_bit_equal(tmp_path, dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    path = tmp_path / "a.pt"
    torch_file.write(path, {"param": array, "transposed": array.T})
    value = reading.read_arrays(path)
    assert value["param"].dtype == array.dtype
    assert value["param"].shape == array.shape
    assert value["param"].tobytes() == array.tobytes()
    assert (value["transposed"] == array.T).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=PLAIN)
def test_plain_values_are_read_equal(tmp_path, value):
    torch_file.write(tmp_path / "a.pt", value)
    assert reading.read_arrays(tmp_path / "a.pt") == value


def test_storages_are_aligned_and_files_deterministic(tmp_path):
    value = {str(n): np.arange(n + 1, dtype=np.uint8) for n in range(40)}
    for name in ("a.pt", "b.pt"):
        torch_file.write(tmp_path / name, value)
    content = (tmp_path / "a.pt").read_bytes()
    assert content == (tmp_path / "b.pt").read_bytes()
    for tensor in reading.read(tmp_path / "a.pt").value.values():
        assert tensor.file_offset % 64 == 0
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
    assert reading.verify(str(tmp_path / "a.pt"))


def test_other_values_are_refused_and_write_nothing(tmp_path):
    for value in ({"a": object()}, [{1}], np.zeros(2, np.uint32)):
        with pytest.raises(errors.CheckpointError, match=r"cannot be|no storage"):
            torch_file.write(tmp_path / "a.pt", value)
    assert not list(tmp_path.iterdir())


def test_long_storages_are_written_bit_equal(tmp_path):
    # Longer than a system call, and not of whole blocks; the last is short.
    arrays = [np.arange(size, dtype=np.int32) for size in (2**21 + 777, 2**15 + 1, 3)]
    torch_file.write(tmp_path / "a.pt", {"a": arrays, "empty": np.zeros(0, np.int8)})
    value = reading.read_arrays(tmp_path / "a.pt")
    for read, array in zip(value["a"], arrays, strict=True):
        assert read.tobytes() == array.tobytes()
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
    assert reading.verify(str(tmp_path / "a.pt"))


@pytest.mark.parametrize("place", [0, 3 * 2**20, -1])
def test_a_file_that_reads_back_other_bytes_is_an_error(tmp_path, monkeypatch, place):
    class Flipping(direct_io.Reader):
        def read(self, path, offset, num_bytes):
            content = bytearray(pathlib.Path(path).read_bytes())
            content[place] ^= 1
            return np.frombuffer(content, np.uint8)[offset : offset + num_bytes]

    monkeypatch.setattr(direct_io, "Reader", Flipping)
    with pytest.raises(errors.CheckpointError, match="read back other"):
        torch_file.write(tmp_path / "a.pt", np.arange(2**20, dtype=np.int64))
    assert not list(tmp_path.iterdir())
