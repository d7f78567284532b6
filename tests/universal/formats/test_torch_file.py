"""Files of torch.save are read bit-equal, without torch, and run nothing."""

import contextlib
import os
import pathlib
import pickle
import struct
import sys
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.universal.formats import torch_file
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import torch_files

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "forgather"
# Of torch 2.13.0: torch.save({"w": x.conj()}, ...), and of x.conj().imag.
LAZY = pathlib.Path(__file__).parent / "data" / "lazy_bits"
VALUES = np.load(GOLDEN / "values.npz")
NESTED = torch_files.with_attributes(torch_files.tensor())


def test_a_header_far_behind_the_end_is_refused(tmp_path):
    local = struct.pack("<4s22xHH", b"PK\x03\x04", 1, 0) + b"x"
    fields = (*(b"PK\x01\x02", 0, 0), *(0, 0, 0), *(1, 12, 0), 0xFFFFFFFF)
    entry = struct.pack("<4s4xHH4xIIIHHH8xI", *fields) + b"x"
    entry += struct.pack("<HHQ", 1, 8, 2**64 - 1)
    sizes = (1, 1, len(entry), len(local), 0)
    path = tmp_path / "x.pt"
    path.write_bytes(local + entry + struct.pack("<4s4xHHIIH", b"PK\x05\x06", *sizes))
    with pytest.raises(FormatError, match=r"x\.pt has no entry where x should be"):
        torch_file.read(path)


@pytest.mark.parametrize("num_bytes", range(0, 24, 4))
def test_sizes_of_64_bits_that_are_missing_are_refused(tmp_path, num_bytes):
    local = struct.pack("<4s22xHH", b"PK\x03\x04", 1, 0) + b"x"
    full = 0xFFFFFFFF
    extra = struct.pack("<HH", 1, num_bytes) + bytes(num_bytes)
    fields = (b"PK\x01\x02", 0, 0, 0, full, full, 1, len(extra), 0, full)
    entry = struct.pack("<4s4xHH4xIIIHHH8xI", *fields) + b"x" + extra
    sizes = (1, 1, len(entry), len(local), 0)
    path = tmp_path / "x.pt"
    path.write_bytes(local + entry + struct.pack("<4s4xHHIIH", b"PK\x05\x06", *sizes))
    refused(path, "is no file of torch.save, or is cut short")


def test_a_version_that_is_a_long_text_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("archive/data.pkl", torch_files.pickled(1))
        archive.writestr("archive/version", "3" + " " * 1000)
    with pytest.raises(FormatError, match="1001 bytes in archive/version"):
        torch_file.read_arrays(tmp_path / "x.pt")


def test_tensors_of_every_type_are_read_bit_equal():
    content = torch_file.read_arrays(GOLDEN / "types.pt")
    tensors = content["tensors"]
    names = [name for name in VALUES if name.startswith("types/")]
    assert {f"types/{name}" for name in tensors} == set(names)
    for name in names:
        array, expected = tensors[name.removeprefix("types/")], VALUES[name]
        if array.dtype == ml_dtypes.bfloat16:
            array = array.view(np.int16)
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        assert array.tobytes() == np.ascontiguousarray(expected).tobytes(), name
    assert "torch" not in sys.modules


def test_other_values_are_plain_ones():
    content = torch_file.read_arrays(GOLDEN / "types.pt")
    first, second = content.pop("same")
    assert first is second
    del content["tensors"]
    assert content == {
        "dtype": np.dtype(ml_dtypes.bfloat16),
        "size": (2, 3),
        "device": "cpu",
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "counter": {3: 1},
        "numbers": [1, -1, 2**40, -(2**70), 0.5, float("inf"), True, None],
        "tuple": (1, ("two", {"three": [4]})),
    }


def test_a_tensor_is_read_when_it_is_asked_for():
    by_path = dict(torch_file.tensors(torch_file.read(GOLDEN / "types.pt").value))
    scalar = by_path["tensors", "scalar"]
    assert (scalar.dtype, scalar.shape) == (np.float64, ())
    assert scalar.read() == 2.5


def test_attributes_of_a_tensor_are_dropped(tmp_path):
    # ZeRO-3 gives its flat tensors a number.
    content = torch_files.with_attributes(torch_files.tensor())
    array = torch_file.read_arrays(
        torch_files.write(tmp_path / "x.pt", {"w": content})
    )["w"]
    assert (array.dtype, array.shape) == (np.float32, (2, 2))


def test_what_makes_no_tensor_is_none(tmp_path):
    content = torch_files.with_attributes(NESTED)
    file = torch_file.read(torch_files.write(tmp_path / "x.pt", {"w": content}))
    assert list(torch_file.tensors(file.value)) == []


def refused(path, match):
    with pytest.raises(FormatError, match=match) as error:
        torch_file.read_arrays(path)
    assert str(path) in str(error.value)


class Attack:
    """Runs a command when Python unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_code_in_a_pickle_is_not_run(tmp_path, protocol):
    touched = tmp_path / "touched"
    content = pickle.dumps({"w": Attack(touched)}, protocol=protocol)
    path = torch_files.write(tmp_path / "x.pt", None, content=content)
    assert torch_file.read_arrays(path) == {"w": f"touch {touched}"}
    assert not touched.exists()


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (torch_files.Named("builtins", "eval", "1+1"), "1+1"),
        (torch_files.Named("builtins", "getattr", {}, "clear"), {}),
        (torch_files.Named("torch", "load", "x"), "x"),
        (torch_files.Named("torch._utils", "_rebuild_tensor_v2.__globals__"), {}),
        (torch_files.Named("elastic_ckpt.core.storage", "remove", "/"), "/"),
        (torch_files.Global("numpy", "load"), "numpy.load"),
        (torch_files.Global("os", "system"), "os.system"),
        (torch_files.Global("torch", "bfloat16"), np.dtype(ml_dtypes.bfloat16)),
    ],
)
def test_names_are_not_imported(tmp_path, value, read):
    path = torch_files.write(tmp_path / "x.pt", value)
    assert torch_file.read_arrays(path) == read


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch_files.tensor(offset=1), "not inside 4 elements"),
        (torch_files.tensor(shape=(5,), strides=(1,)), "not inside"),
        (torch_files.tensor(shape=(2, 2), strides=(3, 1)), "not inside"),
        (torch_files.tensor(shape=(2**40,), strides=(0,)), "not inside"),
        (torch_files.tensor(shape=(0, 2**62), strides=(1, 1)), "too large"),
        (torch_files.tensor(shape=(-2, -2)), "no number from 0 up"),
        (torch_files.tensor(strides=(-1, 1)), "no number from 0 up"),
        (torch_files.tensor(offset=-1), "no number from 0 up"),
        (torch_files.tensor(shape=(2.0, 2)), "no number from 0 up"),
        (torch_files.tensor(shape=(2,)), "1 dims and 2 strides"),
        (torch_files.tensor(shape=[2, 2]), "no tuples"),
        (torch_files.tensor(elements=5), "16 bytes, and 5 elements take 20"),
        (torch_files.tensor(kind="DoubleStorage"), "4 elements take 32"),
        (torch_files.tensor(key="1"), "no entry data/1"),
        (torch_files.tensor(key="../data.pkl"), "no entry data/../data.pkl"),
        (torch_files.tensor(kind="OrderedDict"), "its type is torch.OrderedDict"),
        (torch_files.Named("torch._utils", "_rebuild_tensor_v2", 1), "invalid tensor"),
        (torch_files.Id("storage"), "no tuple of five"),
        ({(1, (2,)): 3}, "key that is a nested or long tuple"),
    ],
)
def test_lying_tensors_are_refused(tmp_path, value, match):
    refused(torch_files.write(tmp_path / "x.pt", {"w": value}), match)


@pytest.mark.parametrize("bit", ["conj", "neg"])
@pytest.mark.parametrize("is_v3", [False, True])
def test_a_lazy_bit_of_a_tensor_is_known(tmp_path, bit, is_v3):
    def tensor(value):
        module, name, arguments = torch_files.tensor().parts
        if is_v3:
            name = name.replace("v2", "v3")
            arguments += (torch_files.Global("torch", "float32"),)
        return torch_files.Named(module, name, *arguments, {bit: value})

    unset = torch_files.write(tmp_path / "unset.pt", {"w": tensor(False)})
    assert torch_file.read_arrays(unset)["w"].tolist() == [[1, 2], [3, 4]]
    path = torch_files.write(tmp_path / "x.pt", {"w": tensor(True)})
    assert torch_file.read(path, with_views=True).value["w"].view == bit
    with pytest.raises(FormatError, match=rf"its {bit} bit is set, .* resolve_{bit}\("):
        torch_file.read(path)


def test_lazy_bits_of_files_of_torch_are_applied():
    conj = torch_file.read_arrays(LAZY / "conj.pt")["w"]
    assert conj.tolist() == [1 - 2j, 3 + 4j]
    assert torch_file.read_arrays(LAZY / "neg.pt")["w"].tolist() == [-2, 4]
    with pytest.raises(FormatError, match=r"its conj bit is set, .* resolve_conj\(\)"):
        torch_file.read(LAZY / "conj.pt")


def test_tensors_that_overlap_cannot_exhaust_memory(tmp_path):
    views = [
        torch_files.tensor(shape=(n, 1), strides=(1, s), elements=1 << 16)
        for n in range(1 << 15, (1 << 15) + 40)
        for s in range(3)
    ]
    entries = {"data/0": bytes(4 << 16)}
    path = torch_files.write(tmp_path / "x.pt", views, entries=entries)
    refused(path, "they overlap; clone them")


def test_entries_that_are_compressed_or_missing_are_refused(tmp_path):
    packed = torch_files.write(
        tmp_path / "packed.pt", {}, compression=zipfile.ZIP_DEFLATED
    )
    refused(packed, "compressed")
    with zipfile.ZipFile(tmp_path / "other.pt", "w") as archive:
        archive.writestr("something", "else")
    refused(tmp_path / "other.pt", "has no data.pkl")
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"w": 1}))
    refused(tmp_path / "old.pt", "before PyTorch 1.6")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_is_there_twice_is_refused(tmp_path):
    path = torch_files.write(tmp_path / "x.pt", {"w": torch_files.tensor()})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data/0", bytes(16))
    refused(path, "data/0 twice")


def test_offsets_outside_of_the_file_and_overlaps_are_refused(tmp_path):
    path = torch_files.write(tmp_path / "x.pt", {"w": torch_files.tensor()})
    content = path.read_bytes()
    # The central directory's record of the storage: its sizes, and its header's offset.
    at = content.rindex(b"archive/data/0") - 46

    def written(*, size=None, offset=None):
        changed = bytearray(content)
        if size is not None:
            struct.pack_into("<II", changed, at + 20, size, size)
        if offset is not None:
            struct.pack_into("<I", changed, at + 42, offset)
        path.write_bytes(changed)

    written(size=1 << 30)
    refused(path, "not inside the")
    written(size=62)
    refused(path, "overlap")
    written(offset=0)
    refused(path, "has no entry where")
    written(offset=1)
    refused(path, "has no entry where")
    written()
    assert torch_file.read_arrays(path)["w"].tolist() == [[1, 2], [3, 4]]


def test_each_flipped_byte_is_an_error_or_changes_nothing_that_was_read(tmp_path):
    path = torch_files.write(tmp_path / "x.pt", {"w": torch_files.tensor()})
    content = path.read_bytes()
    expected = torch_file.read_arrays(path)["w"].tobytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0x41
        path.write_bytes(changed)
        try:
            read = torch_file.read_arrays(path)
        except FormatError:
            continue
        assert [array.tobytes() for array in read.values()] == [expected], place


def test_a_file_that_was_cut_short_is_refused_at_every_length(tmp_path):
    path = torch_files.write(tmp_path / "x.pt", {"w": torch_files.tensor()})
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        refused(path, None)


@pytest.mark.parametrize(
    "content",
    [
        # Lengths that are not there.
        b"\x80\x04\x8e\x00\x00\x00\x00\x00\x01\x00\x00.",
        b"\x80\x02X\xff\xff\xff\x7fx.",
        # A list in a list in ...
        b"\x80\x02" + b"]" * 10_000 + b"a" * 9_999 + b".",
        # Shared lists: 2 ** 60 of them when they are copied.
        b"\x80\x02]q\x00"
        + b"".join(b"]q%c(h%ch%ce" % (n, n - 1, n - 1) for n in range(1, 60))
        + b"0" * 59
        + b"h\x3b1.",
        # A list that contains itself.
        b"\x80\x02]q\x00h\x00a.",
    ],
)
def test_a_small_pickle_takes_little_memory(tmp_path, content):
    path = torch_files.write(tmp_path / "x.pt", None, content=content)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            torch_file.read_arrays(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_memo_number_takes_no_memory(tmp_path):
    # Python's unpickler takes 32 GiB for it.
    content = b"\x80\x02]r\xff\xff\xff\x7f."
    path = torch_files.write(tmp_path / "x.pt", None, content=content)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="takes over 536870912 bytes of memory"):
            torch_file.read_arrays(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_later_version_is_one_clear_error(tmp_path):
    path = torch_files.write(tmp_path / "x.pt", {}, entries={})
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    assert names[-1] == "archive/version"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", torch_files.pickled({}))
        archive.writestr("archive/version", "11\n")
    refused(path, "version b'11', and this program reads 1 to 10")
    path.write_bytes(content)
    assert torch_file.read_arrays(path) == {}


@pytest.mark.slow
@settings(max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 5))
def test_no_pickle_ends_with_another_error(tmp_path_factory, content, start):
    good = torch_files.pickled({"w": [1, (2, "x")], "y": torch_files.tensor()})
    path = tmp_path_factory.mktemp("pickles") / "x.pt"
    # The beginning of a good pickle, and then anything.
    mixed = good[: len(good) * start // 5] + content
    torch_files.write(path, None, content=mixed or b".")
    with contextlib.suppress(FormatError):
        torch_file.read_arrays(path)
