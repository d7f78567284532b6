"""Hostile, truncated and changed checkpoints are one error; nothing is run or written.

`attacks` damages good checkpoints in a process of its own. Here are those that somebody
made to do harm.
"""

import json
import os
import pickle
import subprocess
import sys

import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import attacks, dcp_files, stored_values, torch_files
from tests.universal.formats.dcp_files import FILE
from tests.universal.formats.torch_files import tensor


def report(directory, first, last):
    """What happened to damaged checkpoints, by sample."""
    command = [sys.executable, "-m", "tests.universal.formats.attacks", directory]
    numbers = [str(first), str(last)]
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [*command, *numbers], env=environ, check=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    return report(tmp_path_factory.mktemp("damaged"), 0, 5)


@pytest.mark.parametrize("name", attacks.SAMPLES)
def test_a_damaged_file_is_one_error_or_is_read(damaged, name):
    num_refused, wrong = damaged[name]
    assert wrong == []
    assert num_refused >= 5


@pytest.mark.night
def test_many_damaged_files_are_one_error_or_are_read(tmp_path):
    for name, (_, wrong) in report(tmp_path, 5, 100).items():
        assert wrong == [], name


def refused(path, match):
    """One error that names the path; files are as before."""
    before = {file: file.read_bytes() for file in path.parent.rglob("*.*")}
    with pytest.raises(FormatError, match=match) as error:
        stored_values.contents(path)
    assert str(path) in str(error.value)
    assert {file: file.read_bytes() for file in path.parent.rglob("*.*")} == before


@pytest.mark.parametrize(
    "name", ["model.safetensors", "mp_rank_00_model_states.pt", "latest", ".metadata"]
)
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(FormatError, match=f"{name} is no regular file"):
        opening.open_checkpoint(tmp_path)


@pytest.mark.parametrize("place", ["metadata", "item", "value"])
def test_code_in_a_distributed_checkpoint_is_not_run(tmp_path, place):
    touched = tmp_path / "touched"
    code = pickle.dumps({"w": torch_files.Attack(touched)}, protocol=4)
    item = dcp_files.item(content=code)
    parts = dcp_files.parts(second=item if place == "item" else None)
    if place == "value":
        entry = torch_files.Object(dcp_files.MODULE, "BytesStorageMetadata", {})
        parts.entries["lr"] = entry
        parts.items.append(item)
        start = sum(map(len, parts.items[:2]))
        parts.stored.append((("lr", None), (FILE, start, len(item))))
    path = parts.write(tmp_path / "x", code if place == "metadata" else None)
    if place == "value":
        values = opening.open_checkpoint(path).values
        assert values["lr"] == {"w": f"touch {touched}"}
    else:
        refused(path, "is no metadata" if place == "metadata" else "is no tensor")
    assert not touched.exists()


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (tensor(strides=(2**40, 1)), "not inside 4 elements"),
        (tensor((4, 1), (1, 1)), r"a tensor float32\[4, 1\] .* w is listed there as"),
        (tensor(kind="IntStorage"), r"a tensor int32\[2, 2\]"),
        (None, "'w' is no tensor"),
        (torch_files.lazy(tensor(), "neg"), "with and without the conj or neg bit"),
        (b"PK" * 50, "no file of torch.save"),
    ],
)
def test_items_that_are_no_tensor_as_listed_are_refused(tmp_path, value, match):
    item = value if isinstance(value, bytes) else dcp_files.item(value)
    refused(dcp_files.parts(second=item).write(tmp_path / "x"), match)


@pytest.mark.parametrize("name", [1.5, b"w", (1,)])
def test_names_that_are_no_texts_are_refused(tmp_path, name):
    parts = dcp_files.parts()
    parts.entries[name] = parts.entries.pop("w")
    parts.stored = [((name, first), place) for (_, first), place in parts.stored]
    refused(parts.write(tmp_path / "x"), "is no metadata")


CHUNKS = [((0, 0), (2, 2)), ((2, 0), (2, 2))]


@pytest.mark.parametrize(
    ("shape", "chunks", "match"),
    [
        ((5, 2), CHUNKS, r"w lacks the part \[4:5, 0:2\]"),
        ((3, 2), CHUNKS, "outside of"),
        ((4, 2), [CHUNKS[0], ((1, 0), (2, 2))], "nowhere stored"),
        ((4, 2), [CHUNKS[0]] * 2, "lacks the part"),
        ((4, 2), [*CHUNKS, CHUNKS[0]], "overlap"),
        ((4, 2), [CHUNKS[0], ((2, 0), (2, 1))], "lacks the part"),
        ((2**40, 2**40), CHUNKS, "too large"),
    ],
)
def test_chunks_that_do_not_make_a_tensor_are_refused(tmp_path, shape, chunks, match):
    parts = dcp_files.parts()
    parts.entries["w"] = dcp_files.entry(shape, chunks)
    refused(parts.write(tmp_path / "x"), match)


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (("../x/" + FILE, 0, 9), "'../x/__0_0.distcp', which is no part of a file"),
        (("other.distcp", 0, 9), "other.distcp is missing"),
        ((FILE, 0, 2**40), "is cut short"),
        ((FILE, 2**70, 9), "which is no part"),
        ((FILE, 2**60, 9), "is cut short"),
        ((FILE, 2, 9), "no file of torch.save"),
        ((FILE, -1, 9), "lists 9 bytes from -1"),
    ],
)
def test_items_outside_of_their_file_are_refused(tmp_path, place, match):
    parts = dcp_files.parts()
    parts.stored[1] = (("w", (2, 0)), place)
    refused(parts.write(tmp_path / "x"), match)
