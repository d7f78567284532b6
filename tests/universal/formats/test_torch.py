"""Files of PyTorch are read bit-equal, without torch, and run nothing."""

import collections
import pickle
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal.formats import torch_file
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import torch_files
from tests.universal.formats.stored_values import DATA, GOLDEN, assert_equal
from tests.universal.formats.torch_files import Global, Id, Named, Object

TENSOR = torch_files.tensor()


def test_a_tensor_that_a_file_has_twice_is_one_array():
    content = torch_file.read_arrays(GOLDEN / "forgather" / "types.pt")
    first, second = content["same"]
    assert first is second
    assert content["tensors"]["transposed"].tolist() == first.T.tolist()


def test_lazy_bits_are_applied():
    expected = np.load(DATA / "weights" / "expected.npz")
    arrays = torch_file.read_arrays(DATA / "weights" / "lazy.pt")
    assert len(arrays) == 4
    for name, array in arrays.items():
        assert_equal(array, expected[name])


def refused(path, match):
    with pytest.raises(FormatError, match=match) as error:
        torch_file.read_arrays(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        # Names are not imported.
        (Named("builtins", "eval", "1+1"), "1+1"),
        (Named("builtins", "getattr", {}, "clear"), {}),
        (Named("torch._utils", "_rebuild_tensor_v2.__globals__"), {}),
        (Global("os", "system"), "os.system"),
        (Global("torch", "bfloat16"), np.dtype(ml_dtypes.bfloat16)),
        # Objects are dicts of their attributes; the sample `training.pt` has others.
        (Object("x", "y", {"b": [1], "c": Object("x", "z", {})}), {"b": [1], "c": {}}),
        (Object("x", "y", (1, 2)), {"state": (1, 2)}),
        # ZeRO-3 gives its flat tensors a number, which is dropped.
        (torch_files.with_attributes(TENSOR), [[1, 2], [3, 4]]),
    ],
)
def test_names_and_objects_are_plain_values(tmp_path, value, read):
    path = torch_files.write(tmp_path / "x.pt", value)
    made = torch_file.read_arrays(path)
    assert (made.tolist() if isinstance(made, np.ndarray) else made) == read


@pytest.mark.parametrize("protocol", [2, 5])
def test_values_of_python_are_as_they_were_and_no_code_is_run(tmp_path, protocol):
    touched = tmp_path / "touched"
    value = {
        1: [2**70, -(2**70), 0.5, float("inf"), True, None, "\ud800", b"\x00\xff"],
        (1, "x", 1.5): ({2, 3}, frozenset([4])),
        "changed": [collections.deque([1, 2]), collections.deque, 1 + 2j],
        "code": torch_files.Attack(touched),
    }
    content = pickle.dumps(value, protocol=protocol)
    path = torch_files.write(tmp_path / "x.pt", None, content=content)
    value["changed"] = [[1, 2], "collections.deque", {}]
    value["code"] = f"touch {touched}"
    assert torch_file.read(path).value == value
    assert not touched.exists()


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (torch_files.tensor(offset=1), "storage of 4 elements"),
        (
            torch_files.tensor(shape=(2**40,), strides=(0,)),
            "does not fit in its storage",
        ),
        (torch_files.tensor(shape=(0, 2**62), strides=(1, 1)), "too large"),
        (
            torch_files.tensor(shape=(2, 2), strides=(2**62, 1)),
            "does not fit in its storage",
        ),
        (torch_files.tensor(shape=(-2, -2)), "invalid shape .-2, -2."),
        (torch_files.tensor(strides=(-1, 1)), "non-negative integers"),
        (torch_files.tensor(strides=(2.0, 1)), "non-negative integers"),
        (torch_files.tensor(offset=-1), "non-negative integers"),
        (torch_files.tensor(offset=2**70), "non-negative integers"),
        (torch_files.tensor(shape=(2,)), "exactly one stride per dim"),
        (torch_files.tensor(shape=[2, 2]), "exactly one stride per dim"),
        (torch_files.tensor(kind="DoubleStorage"), "storage of 2 elements"),
        (torch_files.tensor(key="1"), "the storage 1; the storage is missing"),
        (
            torch_files.tensor(kind="OrderedDict"),
            "torch.OrderedDict .* type is unsupported",
        ),
        (torch_files.tensor(key=2**99), "the storage 6338.* storage is missing"),
    ],
)
def test_lying_tensors_are_refused_by_name(tmp_path, value, match):
    path = torch_files.write(tmp_path / "x.pt", {"model": [{"w": value}]})
    refused(path, rf"x\.pt: the tensor 'model/0/w'[^\n]*{match}[^\n]*$")


def test_zips_that_torch_does_not_write_are_refused(tmp_path):
    path = tmp_path / "x.pt"
    refused(torch_files.write(path, {}, compression=zipfile.ZIP_DEFLATED), "compressed")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("something", "else")
    refused(path, "has no data.pkl")
    path.write_bytes(pickle.dumps({"w": 1}))
    refused(path, "before PyTorch 1.6")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", torch_files.pickled({}))
        archive.writestr("archive/byteorder", "big")
    refused(path, "is not little-endian")


def test_a_zip_of_many_or_large_entries_is_read(tmp_path, monkeypatch):
    # So small a limit makes zipfile write each number in 64 bits.
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 3)
    path = torch_files.write(tmp_path / "x.pt", {"w": TENSOR})
    # The old record of the end has no numbers, as of a zip of over 4 GiB.
    content = path.read_bytes()[:-12] + b"\xff" * 10 + bytes(2)
    path.write_bytes(content)
    assert torch_file.read_arrays(path)["w"].tolist() == [[1, 2], [3, 4]]
    # The offset of the directory in the record of the end, then that of an entry.
    for at in (content.index(b"PK\6\6") + 48, content.rindex(b"data/0") + 26):
        for offset in (1 << 62, (1 << 64) - 1, len(content)):
            number = struct.pack("<Q", offset)
            path.write_bytes(content[:at] + number + content[at + 8 :])
            refused(path, "not a torch.save file or is truncated")


@pytest.mark.parametrize(
    ("place", "number", "match"),
    [
        # The sizes of a storage in the directory, then the offset of its header.
        (20, (1 << 30, 1 << 30), "is repeated or outside the zip"),
        (20, (62, 62), "is damaged: its bytes"),
        (42, (0,), "is damaged: its bytes"),
        (42, (1,), "is repeated or outside the zip"),
    ],
)
def test_entries_outside_of_the_file_are_refused(tmp_path, place, number, match):
    path = torch_files.write(tmp_path / "x.pt", {"w": TENSOR})
    content = bytearray(path.read_bytes())
    at = content.rindex(b"archive/data/0") - 46 + place
    struct.pack_into(f"<{len(number)}I", content, at, *number)
    path.write_bytes(content)
    refused(path, match)


@pytest.mark.parametrize(
    "content",
    [
        # Attributes of a class; of a class of the decoder; of a built-in one.
        b"\x80\x02cx\ny\n(N}X\x01\x00\x00\x00aK\x01stb.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(N}X\x07\x00\x00\x00__new__K\x01stb.",
        b"\x80\x02ctorch\nSize\n(N}X\x01\x00\x00\x00aK\x01stb.",
        # A call of a text, and of an object.
        b"\x80\x02X\x01\x00\x00\x00a)R.",
        b"\x80\x02cx\ny\n)R)R.",
        # An object of a text; an extension; a persistent id of none.
        b"\x80\x02X\x01\x00\x00\x00a)\x81.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02NQ.",
        # Values that are nested too deep, and a list that contains itself.
        b"\x80\x02" + b"N" + b"\x85" * 100_000 + b".",
        b"\x80\x02]q\x00h\x00a.",
        # A key that is no plain value, and one that cannot be compared.
        b"\x80\x02}cx\ny\n)\x81K\x01s.",
        b"\x80\x02}]Ns.",
        # What is no storage.
        *map(
            torch_files.pickled,
            (
                Named("torch._utils", "_rebuild_tensor_v2", 1),
                Named("torch._utils", "_rebuild_tensor_v2", *(1,) * 6),
                Id("storage"),
                Id("storage", "FloatStorage", "0", "cpu", 4),
            ),
        ),
        # A number of 2 million bits where a tensor has its shape.
        torch_files.pickled({"w": torch_files.tensor(shape=(1 << 2_000_000, 1))}),
    ],
)
def test_what_the_decoder_does_not_do_is_one_error(tmp_path, content):
    path = torch_files.write(tmp_path / "x.pt", None, content=content)
    refused(path, r"x\.pt[^\n]*$")
    # Indexes are not looked for in texts.
    text = pickle.dumps("r\xff\xff\xff" * 60, 2)[2:-1]
    for put in (b"r\xff\xff\xff\x0a", b"p184549375\n"):
        content = b"\x80\x02}Nr\0\0\0\0" + text + b"s" + put + b"."
        path = torch_files.write(tmp_path / "x.pt", None, content=content)
        refused(path, r"PUT has index 184549375")
    path = torch_files.write(tmp_path / "x.pt", {"w": TENSOR})
    assert torch_file.decoded(content.replace(put, b""), "") == {
        None: "r\xff\xff\xff" * 60
    }
    assert torch_file.read_arrays(path)["w"].tolist() == [[1, 2], [3, 4]]


def test_a_pickle_of_over_256_mib_is_refused(tmp_path):
    path, size = torch_files.write(tmp_path / "x.pt", {}, entries={}), (256 << 20) + 1
    content = path.read_bytes()
    at, begin = content.index(b"PK\1\2"), size + 100
    # The pickle is the first entry, and the end has the offset of the directory.
    sizes, end = struct.pack("<II", size, size), struct.pack("<IH", begin, 0)
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(content[at : at + 20] + sizes + content[at + 28 : -6] + end)
    refused(
        path, f"has a pickle of {size} bytes, but at most {256 << 20} are supported"
    )
