"""Hostile, truncated and changed checkpoints are one error; nothing is run or written.

Parts with a checksum are refused or equal those saved: files of `torch.save`, and items
of distributed checkpoints. Any other tensor that still has its name, type and shape has
its values, unless its own bytes in safetensors or in Orbax's data files were changed.
If a pickle was changed and its CRC-32 made to fit, values may be others.
"""

import binascii
import json
import os
import pickle
import random
import resource
import struct
import zipfile

import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import dcp_files, torch_files
from tests.universal.formats.dcp_files import FILE
from tests.universal.formats.fragment_values import values_of
from tests.universal.formats.source_contents import (
    contents,
    key_of,
    problem_of,
    sample,
)


@pytest.fixture(autouse=True, scope="module")
def limited_memory():
    """A changed pickle may ask for any memory; what it cannot get is an error."""
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + (4 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


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
    """One error that names the path; files are as before."""
    before = tree(path.parent)
    with pytest.raises(FormatError, match=match) as error:
        used(path)
    assert str(path) in str(error.value)
    assert tree(path.parent) == before


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
        refused(path, "is no metadata" if place == "metadata" else "is no tensor")
    assert not touched.exists()


@pytest.mark.parametrize(
    ("item", "match"),
    [
        (dcp_files.item((2, 2), strides=(2**40, 1)), "not inside 4 elements"),
        (dcp_files.item((4, 1)), r"a tensor float32\[4, 1\] .* w is listed there as"),
        (dcp_files.item((2, 2), kind="IntStorage"), r"a tensor int32\[2, 2\]"),
        (dcp_files.item((2, 2), content=b"\x80\x02N."), "'w' is no tensor"),
        (
            dcp_files.item(
                (2, 2),
                content=torch_files.pickled(
                    torch_files.lazy(torch_files.tensor(), "neg")
                ),
            ),
            "parts with and without the conj or neg bit",
        ),
        (b"PK" * 50, "no file of torch.save"),
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
        ((4, 2), [CHUNKS[0], ((1, 0), (2, 2))], "nowhere stored"),
        ((4, 2), [CHUNKS[0]] * 2, "overlap|lacks the part"),
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
        (("../x/" + FILE, 0, 9), "'../x/__0_0.distcp', which is not beside it"),
        (("other.distcp", 0, 9), "other.distcp is missing"),
        ((FILE, 0, 2**40), "cut short: it has"),
        ((FILE, 2**70, 9), "cut short: it has"),
        ((FILE, 2, 9), "no file of torch.save"),
        ((FILE, -1, 9), "lists 9 bytes from -1"),
    ],
)
def test_items_outside_of_their_file_are_refused(tmp_path, place, match):
    parts = dcp_files.parts()
    parts.stored[1] = (("w", (2, 0)), place)
    refused(parts.write(tmp_path / "x"), match)


def test_a_name_that_is_no_unicode_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    values = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({"w\ud800": values}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    refused(path, r"a tensor of the name 'w\\ud800', which is no valid")


# Numbers at which sizes and signs change.
_EDGES = (0, 1, 0x7F, 0x80, 0xFF)
_OPCODES = b"()]}.0acehjqrstuRQbBCGJKMNX\x81\x85\x86\x87\x8a\x8c\x8f\x90\x91\x93\x94"


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The content with one to four changes of the same length, or one of another."""
    if not content:
        return b"x"
    changed = bytearray(content)
    if rng.random() < 0.2:
        start, size = rng.randrange(len(content)), rng.randrange(1, 64)
        part = content[start : start + size]
        if rng.random() < 0.5:
            del changed[start : start + size]
        else:
            changed[start:start] = part * rng.randrange(1, 4)
        return bytes(changed)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(content))
        kind = rng.random()
        if kind < 0.3:
            changed[at] ^= 1 << rng.randrange(8)
        elif kind < 0.5:
            changed[at] = rng.choice(_EDGES)
        elif kind < 0.8:
            changed[at] = rng.choice(_OPCODES)
        else:
            # A part from elsewhere.
            size, other = rng.randrange(1, 16), rng.randrange(len(content))
            part = content[other : other + size][: len(content) - at]
            changed[at : at + len(part)] = part
    return bytes(changed)


def mutated_pickle(path, rng: random.Random) -> bytes:
    """The file with changes in a pickle that it holds, whose CRC-32 is made to fit.

    Raises:
      FormatError: if it holds none.
    """
    content = bytearray(path.read_bytes())
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            entry = archive.getinfo(names[0])
    except (zipfile.BadZipFile, IndexError):
        raise FormatError(f"{path} has no pickle") from None
    lengths = struct.unpack_from("<HH", content, entry.header_offset + 26)
    start, size = entry.header_offset + 30 + sum(lengths), entry.file_size
    pickled = bytes(content[start : start + size])
    changed = mutated(pickled, rng)[:size].ljust(size, b".")
    content[start : start + size] = changed
    # The directory, behind all entries, has the number that counts.
    at = content.rindex(entry.CRC.to_bytes(4, "little"))
    content[at : at + 4] = binascii.crc32(changed).to_bytes(4, "little")
    return bytes(content)


SAMPLES = [
    *("dcp", "safetensors", "orbax", "weights/sharded"),
    *("deepspeed/zero1_dp2", "deepspeed/zero3_tp2_dp2", "deepspeed/zero3_muon_dp2"),
    *("deepspeed/zero1_dp2_universal", "megatron/torch_dist_ep2"),
    *("megatron/mp_rank_pp2_vp2", "forgather/pipeline-2x2"),
]
ZIPS = (".pt", ".pth", ".distcp", ".bin")


def changed_tensors(path, file, content, changed):
    """The keys of tensors without checksums whose own bytes differ in a file."""
    is_orbax = path.name == "orbax"
    if file.suffix != ".safetensors" and not (is_orbax and file.parent.name == "d"):
        return set()
    pairs = enumerate(zip(content, changed, strict=False))
    positions = [at for at, (old, new) in pairs if old != new]
    keys = set()
    for tensor in opening.open_checkpoint(path).tensors:
        held = [each for each in tensor.fragments if each.file == str(file)]
        spans = [
            (each.offset, each.box.volume * tensor.dtype.itemsize) for each in held
        ]
        if is_orbax or any(a <= at < a + n for a, n in spans for at in positions):
            keys.add(key_of(tensor))
    return keys


def check_changed(path, before, rng):
    """Changes a file, reads the checkpoint, and writes the file again.

    Returns whether it was refused.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file())
    file = rng.choice(files)
    content = file.read_bytes()
    changed, is_fitting = mutated(content, rng), False
    if rng.random() < 0.5 and file.suffix in ZIPS:
        try:
            changed, is_fitting = mutated_pickle(file, rng), True
        except FormatError:
            assert file.suffix == ".distcp"
    exempt = changed_tensors(path, file, content, changed)
    file.write_bytes(changed)
    problem = problem_of(path)
    if problem is not None:
        assert str(path) in problem, file
    elif not is_fitting:
        after = contents(path)
        if file.suffix in ZIPS:
            assert after == before, file
        kept = [key for key in before.keys() & after.keys() if key[0] == "tensor"]
        differing = {key for key in kept if after[key] != before[key]}
        assert differing <= exempt, file
    file.write_bytes(content)
    return problem is not None


def check(name, directory, seeds):
    path = sample(name, directory)
    before = contents(path)
    assert any(key[0] == "tensor" for key in before)
    for seed in seeds:
        check_changed(path, before, random.Random(f"{name} {seed}"))
    assert contents(path) == before
    return path


@pytest.mark.parametrize("name", SAMPLES)
def test_a_truncated_or_changed_file_is_one_error_or_is_read(tmp_path, name):
    path = check(name, tmp_path, range(2))
    files = sorted(each for each in path.rglob("*") if each.is_file())
    num_refused = 0
    for number, file in enumerate(
        random.Random(name).sample(files, min(6, len(files)))
    ):
        content = file.read_bytes()
        file.write_bytes(
            content[: (0, len(content) // 2, len(content) - 1)[number % 3]]
        )
        problem = problem_of(path)
        assert problem is None or str(tmp_path) in problem
        num_refused += problem is not None
        file.write_bytes(content)
    assert num_refused


@pytest.mark.night
@pytest.mark.parametrize("name", SAMPLES)
def test_changed_bytes_are_one_error_or_are_read(name, tmp_path):
    check(name, tmp_path, range(2, 300))
