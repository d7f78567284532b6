"""Objects of classes become records of their attributes; nothing is called."""

import pickle
import struct
import tracemalloc

import pytest

from elastic_ckpt.universal.formats import (
    bounded_json,
    closed_pickle,
    inert_names,
    inert_values,
    plain_values,
    source_budget,
    torch_names,
    value_size,
)
from elastic_ckpt.universal.formats.format_error import FormatError


class Plain:
    """A class with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class WithState:
    """A class with a state that is no dict."""

    def __getstate__(self):
        return (1, 2)

    def __setstate__(self, state):
        raise AssertionError("called")


NAMES = {
    f"{__name__} {name}": inert_values.record(name) for name in ("Plain", "WithState")
}


def decoded(value, *, protocol=4, **options):
    content = pickle.dumps(value, protocol=protocol)
    return closed_pickle.decode(content, file="x.pkl", names=NAMES, **options)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_become_records_of_their_attributes(protocol):
    value = decoded({"a": Plain(b=[1], c=Plain()), "d": WithState()}, protocol=protocol)
    assert value == {"a": {"b": [1], "c": {}}, "d": {"state": (1, 2)}}
    assert isinstance(value["a"], inert_values.Record)


def test_records_cannot_contain_themselves():
    value = Plain()
    value.self = value
    with pytest.raises(FormatError, match=r"x\.pkl holds a value that contains itself"):
        decoded(value)
    record = decoded(value, check_size=False)
    assert record["self"] is record


def test_other_classes_are_refused():
    with pytest.raises(FormatError, match="ZeroDivisionError, which is not among"):
        decoded([ZeroDivisionError()])


@pytest.mark.parametrize("unit", [b"}", b"\x8f", b")\x94", b"\x8c\x01x"])
def test_a_pickle_of_too_many_opcodes_takes_little_memory(unit, monkeypatch):
    monkeypatch.setattr(source_budget, "MOST_OPERATIONS", 120_000)
    content = b"\x80\x04" + unit * 200_000 + b"."
    tracemalloc.start()
    try:
        with pytest.raises(
            FormatError, match=r"x\.pkl has more (opcodes|than \d+ sets)"
        ):
            closed_pickle.decode(content, file="x.pkl", names={})
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def repeated(value, before, after, times=5000):
    """A pickle of a list of values, each made of the same one between opcodes."""
    parts = [b"\x80\x04", value, b"q\x000]("]
    parts += [before, b"h\x00", after] * times
    return b"".join([*parts, b"e."])


LARGE_TEXT = b"X" + struct.pack("<I", 100_000) + b"x" * 100_000
LARGE_LIST = b"](" + b"K\x01" * 100_000 + b"e"
ENTRIES = (b"M" + struct.pack("<H", number) + b"N" for number in range(20_000))
LARGE_DICT = b"}(" + b"".join(ENTRIES) + b"u"


@pytest.mark.parametrize(
    "content",
    [
        repeated(LARGE_TEXT, b"c_codecs\nencode\n", b"\x85R"),
        repeated(LARGE_LIST, b"ctorch\nSize\n", b"\x85R"),
        repeated(LARGE_LIST, b"cbuiltins\nset\n", b"\x85R"),
        repeated(LARGE_DICT, b"ccollections\nCounter\n", b"\x85R"),
        repeated(LARGE_DICT, b"cargparse\nNamespace\n)R", b"b"),
    ],
    ids=["text", "shape", "set", "dict", "record"],
)
def test_a_part_that_calls_copy_again_and_again_takes_little_memory(
    content, monkeypatch
):
    monkeypatch.setattr(closed_pickle, "MOST_COPIED_BYTES", 1 << 24)
    names = {**torch_names.NAMES, **inert_names.NAMES}
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"x\.pkl has calls that copy more than"):
            closed_pickle.decode(content, file="x.pkl", names=names)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "key", [2**64, (2**64,), (1,) * 101, ((1,),), (frozenset(),), frozenset()]
)
def test_keys_that_take_long_to_compare_are_refused(key):
    with pytest.raises(FormatError, match=r"x\.pkl has a key that is a nested or long"):
        decoded({key: 1})
    assert decoded({(2**64 - 1, "x", 1.5): {3: 1}}) == {(2**64 - 1, "x", 1.5): {3: 1}}


def test_parts_of_a_path_that_are_no_texts_are_refused():
    value = b"]"
    for _ in range(100):
        # A list of the one before, twice.
        value = b"](" + value + b"q\x00h\x00e"
    content = b"\x80\x04cpathlib\nPosixPath\n" + value + b"\x85R."
    with pytest.raises(FormatError, match=r"invalid pathlib\.PosixPath"):
        closed_pickle.decode(content, file="x.pkl", names=inert_names.NAMES)


def test_a_shared_part_is_measured_once(monkeypatch):
    measured, parts_of = [], value_size._parts

    def counting(node):
        measured.append(node)
        return parts_of(node)

    monkeypatch.setattr(value_size, "_parts", counting)
    shared = [1, 2, 3]
    value_size.check([shared] * 1000, "x.pkl")
    assert len(measured) == 4


def test_long_names_that_many_values_share_take_little_memory(monkeypatch):
    monkeypatch.setattr(source_budget, "MOST_BYTES", 1 << 24)
    value = {"x" * 1_000_000: {number: number for number in range(10_000)}}
    with pytest.raises(FormatError, match=r"x\.pt has values that take over"):
        plain_values.flatten(value, file="x.pt")


def test_json_of_too_many_values_is_refused_before_it_is_parsed():
    content = b'{"a": [' + b"[0]," * 5_000_000 + b"0]}"
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"x\.json has about 15\d+ values"):
            bounded_json.parse(content, "x.json")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
