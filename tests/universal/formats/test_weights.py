"""Weights of safetensors and PyTorch lead to their values; what is wrong is refused.

`test_samples` has files of PyTorch.
"""

import json

import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import safetensors
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal import safetensors_files
from tests.universal.formats import stored_values, torch_files
from tests.universal.rules.relayout import numbered

TENSOR = torch_files.tensor()


def write(path, fields):
    header = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    return path


def field(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"w": field(shape=(2, 3))}, r"w has the data_offsets \[0, 16\]"),
        ({"w": field(shape=(-2, -2))}, "invalid shape"),
        ({"w": field(shape=(0, 1 << 62), offsets=(0, 0))}, "too large"),
        ({"w": field(offsets=(-16, 0))}, "so the header is damaged"),
        ({"w": field(offsets=(0, 17))}, "so the header is damaged"),
        ({"w": field(shape=(2,), offsets=(0, 8))}, "its header describes 8"),
        ({"w": field(shape=(2,), offsets=(8, 16))}, r"should be at \[0, 8\]"),
        ({"v": field(), "w": field(shape=(1,), offsets=(12, 16))}, "should be at"),
        ({"w": field(dtype="F33")}, r"safetensors: w has the unsupported dtype 'F33'"),
        ({"w": [1]}, "invalid safetensors header"),
        ({"__metadata__": 5}, "invalid safetensors header"),
        ({"__metadata__": {"DCP_SHARDING_INFO": "{}"}}, "enable_consolidation=True"),
        (b'{"w": {}, "w": {}}', "repeats a name"),
        (b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_lying_headers_are_refused(tmp_path, fields, match):
    with pytest.raises(FormatError, match=match):
        safetensors.read_header(write(tmp_path / "x.safetensors", fields))


def test_a_file_that_was_cut_short_is_refused_at_every_length(tmp_path):
    path = write(tmp_path / "x.safetensors", {"w": field()})
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError):
            safetensors.read_header(path)
    path.write_bytes((1 << 62).to_bytes(8, "little") + content[8:])
    with pytest.raises(FormatError, match="truncated"):
        safetensors.read_header(path)


def test_a_file_opens_with_its_tensors_and_texts_and_those_of_its_model(tmp_path):
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    arrays = {"w": numbered(3, 4), "s": numbered(), "e": numbered(0, 3)}
    arrays["n"] = np.arange(5)
    safetensors_files.write(path, arrays, format="pt")
    checkpoint = stored_values.assert_holds(tmp_path, arrays)
    assert checkpoint.format == "safetensors"
    assert checkpoint.values == {"format": "pt"}
    assert stored_values.without_checksums(checkpoint) == {str(path)}
    fields = {"head_dim": 4, "text": {"heads": 2}, "types": ["x"], "other": None}
    config.write_text(json.dumps(fields))
    values = {"head_dim": 4, "text/heads": 2, "types": ["x"], "other": None}
    values = {"format": "pt", **{f"config/{key}": values[key] for key in values}}
    assert stored_values.assert_holds(path, arrays).values == values
    config.write_text("{")
    with pytest.raises(FormatError, match=r"config\.json is not valid JSON"):
        opening.open_checkpoint(tmp_path)


def test_an_index_has_the_tensors_of_all_its_files_or_is_refused(tmp_path, subtests):
    path = tmp_path / "model.safetensors.index.json"
    first, second = {"a": numbered(2, 2)}, {"b": numbered(3), "c": numbered(1)}
    safetensors_files.write(tmp_path / "x-1.safetensors", first)
    # The index decides which file a tensor is read from.
    safetensors_files.write(tmp_path / "x-2.safetensors", second | {"a": numbered(5)})
    files = {"a": "x-1.safetensors", **dict.fromkeys("bc", "x-2.safetensors")}
    index = {"metadata": {"total_size": 32}, "weight_map": files}
    path.write_text(json.dumps(index))
    for source in (tmp_path, path):
        checkpoint = stored_values.assert_holds(source, first | second)
        assert checkpoint.values == {"total_size": 32}
    for name, file, match in (
        ("a", "../x-1.safetensors", "lists a in '../x-1.safetensors', which is not"),
        ("a", ["x"], "not a file in the same directory"),
        ("a", "x-3.safetensors", "x-3.safetensors is missing"),
        ("d", "x-1.safetensors", "x-1.safetensors lacks d"),
    ):
        path.write_text(json.dumps({"weight_map": {**files, name: file}}))
        with subtests.test(match), pytest.raises(FormatError, match=match):
            opening.open_checkpoint(tmp_path)


def test_a_numbered_set_of_files_without_an_index_is_complete_or_refused(tmp_path):
    arrays = {str(number): numbered(number) for number in (1, 2, 3)}
    for number, values in arrays.items():
        path = tmp_path / f"model-0000{number}-of-00003.safetensors"
        safetensors_files.write(path, {number: values})
    stored_values.assert_holds(tmp_path, arrays)
    for left in (2, 1):
        (tmp_path / f"model-0000{left}-of-00003.safetensors").unlink()
        match = rf"{left} of the 3 files model-\*-of-00003\.safetensors and no index"
        with pytest.raises(FormatError, match=match):
            opening.open_checkpoint(tmp_path)
    # What is left opens as itself.
    only = tmp_path / "model-00003-of-00003.safetensors"
    stored_values.assert_holds(only, {"3": arrays["3"]})


def test_several_files_or_indices_need_a_choice(tmp_path):
    for name in ("a", "b"):
        safetensors_files.write(tmp_path / f"{name}.safetensors", {"w": numbered(2)})
    with pytest.raises(FormatError, match="has w, which is also in"):
        opening.open_checkpoint(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(FormatError, match=r"one index \(a\.safet.*pass the path"):
        opening.open_checkpoint(tmp_path)


def test_one_file_of_pytorch_with_distinct_tensors_is_opened(tmp_path):
    for name in ("a.pt", "b.pt", "training_args.bin"):
        torch_files.write(tmp_path / name, {"w": TENSOR})
    with pytest.raises(FormatError, match=r"2 PyTorch files \(a\.pt, b\.pt\)"):
        opening.open_checkpoint(tmp_path)
    (tmp_path / "b.pt").unlink()
    assert [each.name for each in opening.open_checkpoint(tmp_path).tensors] == ["w"]

    for value, match in (
        ({"a": {"b": TENSOR}, "a.b": TENSOR}, "has a.b, which is also in"),
        ({"a": 1}, "has no tensors"),
    ):
        torch_files.write(tmp_path / "a.pt", value)
        with pytest.raises(FormatError, match=match):
            opening.open_checkpoint(tmp_path)
