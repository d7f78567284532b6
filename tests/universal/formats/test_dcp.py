"""PyTorch's distributed checkpoints, made without torch: what is wrong is refused.

`test_samples` has those that PyTorch wrote.
"""

import io
import itertools
import pickle

import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import stored_values, torch_files
from tests.universal.formats.stored_values import DATA
from tests.universal.formats.torch_files import Global, Named, Object, tensor

MODULE = "torch.distributed.checkpoint.metadata"
TENSOR = tensor()
STORAGE = "torch.distributed.checkpoint.filesystem", "_StorageInfo"
FILE = "__0_0.distcp"


def size(dims):
    return Named("torch", "Size", tuple(dims))


def item(value=TENSOR, content=None):
    """The bytes of an item: a file of torch.save with a tensor of 2 x 2 floats."""
    file = io.BytesIO()
    torch_files.write(file, value, content=content)
    return file.getvalue()


def entry(shape, chunks):
    """The metadata of a tensor; `chunks` are pairs of offsets and sizes."""
    properties = (
        Global("torch", "float32"),
        Named("torch.serialization", "_get_layout", "torch.strided"),
        False,
        Named(MODULE, "_MEM_FORMAT_ENCODING", 0),
        False,
    )
    parts = [
        {"offsets": size(offsets), "sizes": size(sizes)} for offsets, sizes in chunks
    ]
    state = {
        "properties": Object(MODULE, "TensorProperties", properties),
        "size": size(shape),
        "chunks": [Object(MODULE, "ChunkStorageMetadata", part) for part in parts],
    }
    return Object(MODULE, "TensorStorageMetadata", state)


CHUNKS = [((0, 0), (2, 2)), ((2, 0), (2, 2))]


class Parts:
    """The parts of a checkpoint that has `w`, 4 x 2 floats, in two items."""

    def __init__(self, second=None):
        self.items = [item(), second or item()]
        sizes = [len(each) for each in self.items]
        places = (FILE, 0, sizes[0]), (FILE, *sizes)
        self.stored = [(("w", (2 * n, 0)), place) for n, place in enumerate(places)]
        self.entries, self.paths = {"w": entry((4, 2), CHUNKS)}, {}

    def write(self, directory, content=None):
        """Writes the files into a new directory."""
        directory.mkdir()
        (directory / FILE).write_bytes(b"".join(self.items))
        data = {}
        for (name, first), (file, start, length) in self.stored:
            state = {"fqn": name, "index": 0}
            state |= {} if first is None else {"offset": size(first)}
            info = {"relative_path": file, "offset": start, "length": length}
            data[Object(MODULE, "MetadataIndex", state)] = Object(*STORAGE, info)
        state = {"state_dict_metadata": self.entries, "storage_data": data}
        state["planner_data"] = self.paths
        made = torch_files.pickled(Object(MODULE, "Metadata", state))
        (directory / ".metadata").write_bytes(made if content is None else content)
        return directory


@pytest.mark.parametrize(
    ("save", "match"),
    [
        (
            "zstd",
            r"\.metadata lists items that extensions transformed.*'stream\.zstd/1'",
        ),
        ("safetensors", r"__0_0\.distcp is not a torch\.save file"),
    ],
)
def test_extensions_and_other_formats_of_tensors_are_refused(save, match):
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(DATA / "dcp_saves" / save)


def test_a_tensor_of_thousands_of_chunks_is_read(tmp_path):
    kinds = [item(np.float32([n])) for n in range(7)]
    parts, count = Parts(), 2100
    chunks = [((n,), (1,)) for n in range(count)]
    parts.entries = {"w": entry((count,), chunks)}
    parts.items = [kinds[n % 7] for n in range(count)]
    ends = itertools.accumulate(map(len, parts.items), initial=0)
    parts.stored = [
        (("w", (n,)), (FILE, at, len(parts.items[n])))
        for n, at in enumerate(itertools.islice(ends, count))
    ]
    checkpoint = opening.open_checkpoint(parts.write(tmp_path / "x"))
    (stored,) = checkpoint.tensors
    assert stored_values.read(stored).tolist() == [n % 7 for n in range(count)]
    assert not stored_values.without_checksums(checkpoint)


@pytest.mark.parametrize("keys", [(), 5, "w"])
def test_paths_of_names_that_are_none_are_passed_over(tmp_path, keys):
    parts, name = Parts(), "o.state.w.exp_avg"
    parts.entries[name] = parts.entries["w"]
    parts.stored += [((name, first), place) for (_, first), place in parts.stored]
    parts.paths = {"w": keys, "absent": ("w",)}
    tensors = opening.open_checkpoint(parts.write(tmp_path / "x")).tensors
    kinds = [(t.name, t.kind) for t in tensors]
    assert kinds == [("w", "parameter"), ("w", "first_moment")]


def refused(path, match):
    """One error that names the path; files are as before."""
    before = {file: file.read_bytes() for file in path.parent.rglob("*.*")}
    with pytest.raises(FormatError, match=match) as error:
        stored_values.contents(path)
    assert str(path) in str(error.value)
    assert {file: file.read_bytes() for file in path.parent.rglob("*.*")} == before


@pytest.mark.parametrize("place", ["metadata", "item", "value"])
def test_code_in_a_distributed_checkpoint_is_not_run(tmp_path, place):
    touched = tmp_path / "touched"
    code = pickle.dumps({"w": torch_files.Attack(touched)}, protocol=4)
    made = item(content=code)
    parts = Parts(made if place == "item" else None)
    if place == "value":
        parts.entries["lr"] = Object(MODULE, "BytesStorageMetadata", {})
        parts.items.append(made)
        start = sum(map(len, parts.items[:2]))
        parts.stored.append((("lr", None), (FILE, start, len(made))))
    path = parts.write(tmp_path / "x", code if place == "metadata" else None)
    if place == "value":
        values = opening.open_checkpoint(path).values
        assert values["lr"] == {"w": f"touch {touched}"}
    else:
        refused(path, "not the metadata" if place == "metadata" else "is not a tensor")
    assert not touched.exists()


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (tensor(strides=(2**40, 1)), "storage of 4 elements"),
        (tensor((4, 1), (1, 1)), r"a tensor float32\[4, 1\] .* where w is listed as"),
        (tensor(kind="IntStorage"), r"a tensor int32\[2, 2\]"),
        (None, "'w' is not a tensor"),
        (torch_files.lazy(tensor(), "neg"), "only some .* the conj or neg bit"),
        (b"PK" * 50, "not a torch.save file"),
    ],
)
def test_items_that_are_no_tensor_as_listed_are_refused(tmp_path, value, match):
    made = value if isinstance(value, bytes) else item(value)
    refused(Parts(made).write(tmp_path / "x"), match)


@pytest.mark.parametrize("name", [1.5, b"w", (1,)])
def test_names_that_are_no_texts_are_refused(tmp_path, name):
    parts = Parts()
    parts.entries[name] = parts.entries.pop("w")
    parts.stored = [((name, first), place) for (_, first), place in parts.stored]
    refused(parts.write(tmp_path / "x"), "is not the metadata")


@pytest.mark.parametrize(
    ("shape", "chunks", "match"),
    [
        ((5, 2), CHUNKS, r"w lacks the part \[4:5, 0:2\]"),
        ((3, 2), CHUNKS, "outside"),
        ((4, 2), [CHUNKS[0], ((1, 0), (2, 2))], "does not say where it is stored"),
        ((4, 2), [CHUNKS[0]] * 2, "lacks the part"),
        ((4, 2), [*CHUNKS, CHUNKS[0]], "overlap"),
        ((4, 2), [CHUNKS[0], ((2, 0), (2, 1))], "lacks the part"),
        ((2**40, 2**40), CHUNKS, "too large"),
    ],
)
def test_chunks_that_do_not_make_a_tensor_are_refused(tmp_path, shape, chunks, match):
    parts = Parts()
    parts.entries["w"] = entry(shape, chunks)
    refused(parts.write(tmp_path / "x"), match)


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (("../x/" + FILE, 0, 9), "'../x/__0_0.distcp', which is not a valid part"),
        (("other.distcp", 0, 9), "other.distcp is missing"),
        ((FILE, 0, 2**40), "is truncated"),
        ((FILE, 2**70, 9), "which is not a valid part"),
        ((FILE, 2**60, 9), "is truncated"),
        ((FILE, 2, 9), "not a torch.save file"),
        ((FILE, -1, 9), "lists 9 bytes at offset -1"),
    ],
)
def test_items_outside_of_their_file_are_refused(tmp_path, place, match):
    parts = Parts()
    parts.stored[1] = (("w", (2, 0)), place)
    refused(parts.write(tmp_path / "x"), match)
