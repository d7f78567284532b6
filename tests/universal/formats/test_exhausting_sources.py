"""Small files that stand for much memory or time are refused within the limits.

The limits of `process_limits` hold in all tests here.
"""

import contextlib
import itertools
import json
import resource
import struct

import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import (
    plain_pickle,
    plain_values,
    source_budget,
    source_files,
    torch_file,
    zero,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.torch_file import TorchFile
from tests.universal.formats import dcp_files, process_limits, torch_files

# Most pickles of so many opcodes take less than a second.
NUM_OPERATIONS = 4_000_000


def decoded(content):
    return plain_pickle.value(
        b"\x80\x04" + content + b".",
        file="x.pkl",
        budget=SourceBudget(),
        names={},
        tensor=list,
    )


def refused(content, match):
    with pytest.raises(FormatError, match=rf"x\.pkl .*{match}"):
        decoded(content)


def called(name, argument):
    """Keeps a name and its arguments; then `h0h1R` is a call."""
    return b"c" + name + b"\nq\x00" + argument + b"q\x01\x85q\x020"


FIVE = b"}(K\x01NK\x02NK\x03NK\x04NK\x05Nu"
TEN = b"}(" + b"".join(b"K%cN" % number for number in range(10)) + b"u"
FORTY = b"(" + b"".join(b"K%c" % number for number in range(40)) + b"t"
# The beginning, what is repeated, and the opcodes of each.
UNITS = {
    "dicts": (b"", b"}", 1),
    "lists": (b"", b"]", 1),
    "kept lists": (b"", b"]\x94", 2),
    "marks": (b"", b"(", 1),
    "numbers": (b"", b"G12345678", 1),
    "nested tuples": (b"N", b"\x85", 1),
    "dicts of one": (b"", b"}K\x01Ns", 4),
    "filled records": (
        *(b"cargparse\nNamespace\nq\x00" + TEN + b"q\x010",),
        *(b"h\x00)Rh\x01b", 5),
    ),
    "mappings": (called(b"collections\nCounter", FIVE), b"h\x00h\x02R", 3),
    "shapes": (called(b"torch\nSize", FORTY), b"h\x00h\x02R", 3),
    "sets": (called(b"builtins\nset", FORTY), b"h\x00h\x02R", 3),
    "keys of types": (b"(ctorch\nfloat32\nq\x000", b"h\x00N", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("unit", UNITS)
def test_many_opcodes_take_no_more_than_the_limits(unit):
    begin, repeated, operations = UNITS[unit]
    times = NUM_OPERATIONS // operations
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The process that decodes it, and this one, stay within their limits.
    with contextlib.suppress(FormatError):
        decoded(b"(" + begin + repeated * times + b"t")
    plain_pickle._WORKER.stop()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < source_budget.MOST_SECS + 5


def test_tuples_nest_no_deeper_than_readers_follow():
    refused(b"N" + b"\x85" * 1_000_000, "nested deeper")


def test_keys_that_nest_deep_end_the_decoder_alone():
    # Python hashes tuples by recursion, beyond the stack.
    refused(b"}(N" + b"\x85" * 1_000_000 + b"Nu", "has a pickle that takes over")
    assert decoded(b"K\x01") == 1


def tuples_of_equal_hashes(count):
    """Pairs of numbers whose hashes are made equal, by the inverse of the last step."""
    mask, factor, start = 2**64 - 1, 14029467366897019727, 2870177450012600261
    inverse = pow(factor, -1, 2**64)

    def after(first):
        total = (start + first * factor) & mask
        return ((total << 31 | total >> 33) * 11400714785074694791) & mask

    end = (after(1) + factor) & mask
    pairs = ((n, ((end - after(n)) * inverse) & mask) for n in itertools.count(2))
    return list(itertools.islice((p for p in pairs if p[1] < 2**61 - 1), count))


@pytest.mark.slow
def test_keys_of_equal_hashes_take_little_time():
    pairs = tuples_of_equal_hashes(20_000)
    assert len(set(map(hash, pairs[:50]))) == 1
    keys = [
        b"J" + struct.pack("<i", a) + b"\x8a\x08" + struct.pack("<q", b) + b"\x86N"
        for a, b in pairs
    ]
    refused(b"}(" + b"".join(keys) + b"u", "(over 10000 keys|has a pickle that takes)")


@pytest.mark.slow
def test_numbers_of_equal_hashes_take_little_time():
    multiples = (n * (2**61 - 1) for n in range(2**70, 2**70 + 50_000))
    items = b"".join(b"\x8a\x20" + each.to_bytes(32, "little") for each in multiples)
    refused(
        b"cbuiltins\nset\n](" + items + b"e\x85R",
        "(a number of over 64 bits|has a pickle that takes)",
    )


@pytest.mark.parametrize("times", [1, 2])
def test_wide_characters_make_no_large_texts(times):
    text = b"x" * (100 << 20) + "\U0001f600".encode()
    content = (b"X" + struct.pack("<I", len(text)) + text) * times
    refused(content, "(has a pickle that takes over|malformed|too much memory|values)")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b'{"a": "' + b"x" * (90 << 20) + "\U0001f600".encode() + b'"}', "as large"),
        (b"{" + b",".join(b'"%d":0' % n for n in range(5_000_000)) + b"}", "values"),
        (b'{"a": [' + b'{"a":0},' * 2_900_000 + b"0]}", "values"),
    ],
    ids=["wide", "names", "objects"],
)
def test_large_json_is_refused_before_it_is_parsed(content, match):
    with pytest.raises(FormatError, match=rf"x\.json .*{match}"):
        source_files.parse_json(content, "x.json")


@pytest.mark.slow
def test_an_index_of_millions_of_names_takes_little_time(tmp_path, monkeypatch):
    header = json.dumps({"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    (tmp_path / "x.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode()
    )
    listed = {f"w{number}": "x.safetensors" for number in range(3_000_000)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    # It takes 5 on a sound processor, and took 60.
    monkeypatch.setattr(process_limits, "MOST_SECS", 30)
    with pytest.raises(FormatError, match=r"x\.safetensors lacks w0, which"):
        opening.open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["w", "layers.0.", "state."])
def test_a_name_of_millions_of_bytes_takes_little_time(tmp_path, name, monkeypatch):
    name = name * (5_000_000 // len(name)) + "x"
    header = json.dumps({name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}})
    (tmp_path / "x.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode()
    )
    torch_files.write(tmp_path / "x.pt", {name: torch_files.tensor()})
    parts = dcp_files.parts()
    parts.entries[name] = dcp_files.entry((0,), [])
    parts.write(tmp_path / "dcp")
    monkeypatch.setattr(process_limits, "MOST_SECS", 30)
    for path in ("x.safetensors", "x.pt", "dcp"):
        tensors = opening.open_checkpoint(tmp_path / path).tensors
        assert name in [tensor.name for tensor in tensors]


def test_a_directory_of_a_zip_may_not_be_a_hole(tmp_path):
    path = tmp_path / "x.pt"
    size = 3 << 30
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(struct.pack("<4s4xHHIIH", b"PK\x05\x06", 1, 1, size, 0, 0))
    with pytest.raises(FormatError, match=rf"x\.pt .*directory would have {size} byt"):
        torch_file.read(path)


def test_paths_of_shared_parts_take_little_time():
    value = {"k" * 1_000_000: {}}
    for _ in range(15):
        value = {"a": value, "b": value}
    with pytest.raises(FormatError, match=r"x\.pt has values that take over"):
        plain_values.flatten(value, file="x.pt")


def test_many_states_of_many_parameters_are_refused(tmp_path):
    path = torch_files.write(tmp_path / "x.pt", torch_files.tensor())
    tensor = torch_file.read(path).value
    states = {f"state{number}": tensor for number in range(40)}
    file = TorchFile(path=str(path), value={})
    with pytest.raises(FormatError, match=r"x\.pt has 41 states of each parameter"):
        zero._flat_tensors(file, 0, tensor, [states])
