"""Small files that stand for much memory or time are refused within the limits.

The limits of `process_limits` hold in all tests here.
"""

import contextlib
import itertools
import struct

import pytest

from elastic_ckpt.universal.formats import (
    bounded_json,
    closed_pickle,
    inert_names,
    plain_values,
    torch_names,
    torch_zip,
    zero,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import MOST_OPERATIONS
from elastic_ckpt.universal.formats.torch_file import TorchFile
from tests.universal.formats import torch_files

NAMES = {**torch_names.NAMES, **inert_names.NAMES}


def decoded(content):
    return closed_pickle.decode(b"\x80\x04" + content + b".", file="x.pkl", names=NAMES)


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


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize("unit", UNITS)
def test_as_many_opcodes_as_are_read_take_no_more_than_the_limits(unit):
    begin, repeated, operations = UNITS[unit]
    times = int(0.95 * MOST_OPERATIONS) // operations
    # Other limits may refuse it; the process stays within its own.
    with contextlib.suppress(FormatError):
        decoded(b"(" + begin + repeated * times + b"t")


@pytest.mark.slow(minutes=1)
@pytest.mark.parametrize("unit", UNITS)
def test_more_opcodes_than_are_read_are_refused(unit):
    begin, repeated, operations = UNITS[unit]
    times = int(1.1 * MOST_OPERATIONS) // operations
    refused(b"(" + begin + repeated * times + b"t", "")


def test_tuples_nest_no_deeper_than_readers_follow():
    refused(b"N" + b"\x85" * 1_000_000, "nested deeper")


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


def test_keys_of_equal_hashes_take_little_time():
    pairs = tuples_of_equal_hashes(20_000)
    assert len(set(map(hash, pairs[:50]))) == 1
    keys = [
        b"J" + struct.pack("<i", a) + b"\x8a\x08" + struct.pack("<q", b) + b"\x86N"
        for a, b in pairs
    ]
    refused(b"}(" + b"".join(keys) + b"u", "over 10000 keys that are no texts")


def test_numbers_of_equal_hashes_take_little_time():
    multiples = (n * (2**61 - 1) for n in range(2**70, 2**70 + 50_000))
    items = b"".join(b"\x8a\x20" + each.to_bytes(32, "little") for each in multiples)
    refused(b"cbuiltins\nset\n](" + items + b"e\x85R", "a number of over 64 bits")


@pytest.mark.parametrize("times", [1, 2])
def test_wide_characters_make_no_large_texts(times):
    text = b"x" * (100 << 20) + "\U0001f600".encode()
    refused((b"X" + struct.pack("<I", len(text)) + text) * times, "texts that take so")


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
        bounded_json.parse(content, "x.json")


def test_a_directory_of_a_zip_may_not_be_a_hole(tmp_path):
    path = tmp_path / "x.pt"
    size = 3 << 30
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(size)
        file.write(struct.pack("<4s4xHHIIH", b"PK\x05\x06", 1, 1, size, 0, 0))
    with pytest.raises(FormatError, match=rf"x\.pt .*directory would have {size} byt"):
        torch_zip.read(path)


def test_paths_of_shared_parts_take_little_time():
    value = {"k" * 1_000_000: {}}
    for _ in range(15):
        value = {"a": value, "b": value}
    with pytest.raises(FormatError, match=r"x\.pt has values that take over"):
        plain_values.flatten(value, file="x.pt")


def test_many_states_of_many_parameters_are_refused(tmp_path):
    path = torch_files.write(tmp_path / "x.pt", torch_files.tensor())
    with torch_zip.TorchZip(path) as opened:
        tensor = opened.value
    states = {f"state{number}": tensor for number in range(40)}
    file = TorchFile(path=str(path), value={})
    with pytest.raises(FormatError, match=r"x\.pt has 41 states of each parameter"):
        zero._flat_tensors(file, 0, tensor, [states])
