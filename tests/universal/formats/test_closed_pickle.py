"""Objects of classes become records of their attributes; nothing is called."""

import pickle
import tracemalloc

import pytest

from elastic_ckpt.universal.formats import bounded_json, closed_pickle
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
    f"{__name__} {name}": closed_pickle.record(name) for name in ("Plain", "WithState")
}


def decoded(value, *, protocol=4, **options):
    content = pickle.dumps(value, protocol=protocol)
    return closed_pickle.decode(content, file="x.pkl", names=NAMES, **options)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_become_records_of_their_attributes(protocol):
    value = decoded({"a": Plain(b=[1], c=Plain()), "d": WithState()}, protocol=protocol)
    assert value == {"a": {"b": [1], "c": {}}, "d": {"state": (1, 2)}}
    assert isinstance(value["a"], closed_pickle.Record)


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
def test_a_pickle_of_too_many_opcodes_takes_little_memory(unit):
    content = b"\x80\x04" + unit * 200_000 + b"."
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"x\.pkl has more than \d+ "):
            closed_pickle.decode(
                content, file="x.pkl", names={}, most_operations=120_000
            )
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_json_of_too_many_values_is_refused_before_it_is_parsed():
    content = b'{"a": [' + b"[0]," * 5_000_000 + b"0]}"
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=r"x\.json has about 15\d+ values"):
            bounded_json.parse(content, "x.json")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
