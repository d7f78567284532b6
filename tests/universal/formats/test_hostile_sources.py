"""Hostile and truncated checkpoints are one error; nothing is run or written."""

import json
import os
import pickle
import struct
import tracemalloc
import zipfile

import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import source_budget
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import dcp_files, source_contents, torch_files
from tests.universal.formats.dcp_files import FILE
from tests.universal.formats.fragment_values import values_of

MOST_BYTES = 64 << 20


def used(path):
    """Opens a checkpoint, compares its checksums, and reads all that it has."""
    checkpoint = opening.open_checkpoint(path)
    files = {each.file for t in checkpoint.tensors for each in t.fragments}
    checkpoint.check(sorted(files))
    for tensor in checkpoint.tensors:
        values_of(tensor)
    for name in checkpoint.values:
        assert name in checkpoint.values
        checkpoint.values[name]
    return checkpoint


def tree(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def refused(path, match):
    """One error that names the path; memory is bounded and files are as before."""
    before = tree(path.parent)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=match) as error:
            used(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)
    assert tree(path.parent) == before


def test_the_checkpoint_that_is_harmed_here_is_a_good_one(tmp_path):
    checkpoint = used(dcp_files.parts().write(tmp_path / "x"))
    (tensor,) = checkpoint.tensors
    assert values_of(tensor).tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "mp_rank_00_model_states.pt", "latest", ".metadata"]
)
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(FormatError, match=f"{name} is no regular file"):
        opening.open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["latest", "latest_checkpointed_iteration.txt"])
def test_a_long_name_of_the_latest_step_is_refused(tmp_path, name):
    (tmp_path / name).write_text("1" + " " * 2000)
    with pytest.raises(FormatError, match=f"{name} has 2001 bytes, and at most"):
        opening.open_checkpoint(tmp_path)


class Attack:
    """Runs a command when Python unpickles it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("place", ["metadata", "item", "value"])
def test_code_in_a_distributed_checkpoint_is_not_run(tmp_path, place):
    touched = tmp_path / "touched"
    code = pickle.dumps({"w": Attack(touched)}, protocol=4)
    parts = dcp_files.parts()
    if place == "item":
        parts = dcp_files.parts(second=dcp_files.item((2, 2), content=code))
    elif place == "value":
        parts.entries["lr"] = torch_files.Object(
            dcp_files.MODULE, "BytesStorageMetadata", {}
        )
        parts.items.append(dcp_files.item((2, 2), content=code))
        at = sum(map(len, parts.items[:2]))
        parts.stored.append((("lr", None), (FILE, at, len(parts.items[2]))))
    path = parts.write(tmp_path / "x", code if place == "metadata" else None)
    if place == "value":
        assert used(path).values["lr"] == {"w": f"touch {touched}"}
    else:
        refused(path, "is no metadata" if place == "metadata" else "no tensor")
    assert not touched.exists()


def overlapping_item():
    content = bytearray(
        dcp_files.item((2, 2), entries={"data/0": bytes(16), "data/1": bytes(9)})
    )
    # The directory lists 62 bytes of the first, which end in the second.
    sizes = content.rindex(b"archive/data/0") - 46 + 20
    struct.pack_into("<II", content, sizes, 62, 62)
    return bytes(content)


@pytest.mark.parametrize(
    ("item", "match"),
    [
        (dcp_files.item((2, 2), compression=zipfile.ZIP_DEFLATED), "compressed"),
        (overlapping_item(), "has entries that overlap"),
        (dcp_files.item((2, 2), strides=(2**40, 1)), "not inside 4 elements"),
        (dcp_files.item((2, 2), strides=(-2, 1)), "no number from 0 up"),
        (dcp_files.item((2, 2), offset=1), "not inside 4 elements"),
        (dcp_files.item((2, 2), elements=5), "5 elements take 20"),
        (dcp_files.item((4, 1)), r"a tensor float32\[4, 1\] .* w is listed there as"),
        (dcp_files.item((2, 2), kind="IntStorage"), r"a tensor int32\[2, 2\]"),
        (dcp_files.item((2, 2), content=b"\x80\x02N."), "no tensor, but one is listed"),
        (b"PK" * 50, "no file of PyTorch's"),
        (b"", "no file of PyTorch's"),
    ],
)
def test_items_that_are_no_tensor_as_listed_are_refused(tmp_path, item, match):
    parts = dcp_files.parts(second=item or b"x")
    refused(parts.write(tmp_path / "x"), match)


CHUNKS = [((0, 0), (2, 2)), ((2, 0), (2, 2))]


@pytest.mark.parametrize(
    ("shape", "chunks", "match"),
    [
        ((5, 2), CHUNKS, r"w lacks the part \[4:5, 0:2\]"),
        ((3, 2), CHUNKS, "outside of"),
        ((4, 2), [CHUNKS[0], ((1, 0), (2, 2))], "without values"),
        ((4, 2), [CHUNKS[0]] * 2, "overlap|lacks the part"),
        ((4, 2), [CHUNKS[0], ((2, 0), (2, 1))], "lacks the part"),
        ((2**40, 2**40), CHUNKS, "too large"),
        ((4, 2), [((0,), (2,))], r"a chunk of w at \[0\] without values"),
        ((4, 2), [((0, 0), (4,))], "a chunk of 1 dims"),
        ((4, 2), CHUNKS * 1000, "nowhere stored"),
    ],
)
def test_chunks_that_do_not_make_a_tensor_are_refused(tmp_path, shape, chunks, match):
    parts = dcp_files.parts()
    parts.entries["w"] = dcp_files.entry(shape, chunks)
    refused(parts.write(tmp_path / "x"), match)


def nested(value, times=60):
    """A value of itself, twice, again and again; a copy would fill memory."""
    for _ in range(times):
        value = type(value)((value, value))
    return value


NESTED = nested([])


@pytest.mark.slow
@pytest.mark.parametrize("key", ["offsets", "sizes"])
def test_a_shape_of_shapes_is_refused(tmp_path, key, monkeypatch):
    monkeypatch.setattr(source_budget, "MOST_SECS", 1)
    parts = dcp_files.parts()
    chunks = parts.entries["w"].parts[2]["chunks"]
    chunks[0].parts[2][key] = nested(())
    refused(parts.write(tmp_path / "x"), "has a pickle that takes over")


def test_keys_of_keys_are_no_names(tmp_path):
    parts = dcp_files.parts()
    parts.paths["w"] = (nested(()),)
    (tensor,) = used(parts.write(tmp_path / "x")).tensors
    assert tensor.name == "w"


@pytest.mark.slow
def test_an_index_of_shapes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(source_budget, "MOST_SECS", 1)
    index = dcp_files.index("w", None)
    index.parts[2]["offset"] = nested(())
    monkeypatch.setattr(dcp_files, "index", lambda *_: index)
    refused(dcp_files.parts().write(tmp_path / "x"), "has a pickle that takes over")


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (("../x/" + FILE, 0, 9), "'../x/__0_0.distcp', which is not beside it"),
        (("/etc/passwd", 0, 9), "'/etc/passwd', which is not beside it"),
        ((".metadata", 0, 9), "'.metadata', which is not beside it"),
        (("other.distcp", 0, 9), "other.distcp is missing"),
        ((FILE, 0, 2**40), "overlap|cut short"),
        ((FILE, 2**40, 9), "cut short"),
        ((FILE, 2, 9), "overlap"),
        ((FILE, -1, 9), "lists 9 bytes from -1"),
        ((FILE, 0.5, 9), "lists 9 bytes from 0.5"),
        (([FILE], 0, 9), "which is not beside it"),
        ((NESTED, 0, 9), "a list, which is not beside it"),
        ((FILE, 0, NESTED), "lists a list bytes from 0"),
    ],
)
def test_items_outside_of_their_file_are_refused(tmp_path, place, match):
    parts = dcp_files.parts()
    parts.stored[1] = (("w", (2, 0)), place)
    refused(parts.write(tmp_path / "x"), match)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x04\x8e\x00\x00\x00\x00\x00\x01\x00\x00.",
        b"\x80\x04]\x94r\xff\xff\xff\x7f.",
        torch_files.pickled({"state_dict_metadata": {"w": {}}, "storage_data": {}}),
        torch_files.pickled({"state_dict_metadata": [1], "storage_data": {1: 2}}),
        torch_files.pickled(torch_files.Global("torch", "float32")),
    ],
)
def test_pickles_that_are_no_metadata_take_little_memory(tmp_path, content):
    refused(dcp_files.parts().write(tmp_path / "x", content), r"\.metadata")


def test_a_list_of_chunks_that_many_tensors_share_takes_little_time(tmp_path):
    parts = dcp_files.parts()
    shared = dcp_files.entry((4, 2), CHUNKS * 500)
    parts.entries = {f"w{n}": shared for n in range(300)}
    refused(parts.write(tmp_path / "x"), "nowhere stored")


@pytest.mark.parametrize(
    "name",
    [
        *("dcp", "dcp_hf", "safetensors", "orbax"),
        *("deepspeed/zero1_dp2", "deepspeed/zero3_dp2", "megatron/torch_dist_ep2"),
        *("megatron/mp_rank_pp2_vp2", "forgather/pipeline-2x2", "ram"),
        *("weights/single", "weights/sharded", "weights/meta"),
    ],
)
def test_each_truncated_file_is_one_error_or_was_not_needed(tmp_path, name):
    path = source_contents.sample(name, tmp_path)
    source_contents.contents(path)
    num_refused = 0
    for file in sorted(each for each in path.rglob("*") if each.is_file()):
        content = file.read_bytes()
        for length in {0, 1, len(content) // 2, len(content) - 1} - {len(content)}:
            file.write_bytes(content[: max(0, length)])
            problem = source_contents.problem_of(path)
            assert problem is None or str(tmp_path) in problem
            num_refused += problem is not None
        file.write_bytes(content)
    assert num_refused


def test_a_name_that_is_no_unicode_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    values = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({"w\ud800": values}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    refused(path, r"a tensor of the name 'w\\ud800', which is no valid")
