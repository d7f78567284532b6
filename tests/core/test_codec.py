"""Values of declared types come back from JSON as they were, or not at all."""

import dataclasses
import enum
import json
from collections.abc import Mapping

import pytest
from etils import epath

from elastic_ckpt.core import codec


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    numbers: tuple[int, ...]
    pair: tuple[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner | None
    by_name: Mapping[str, Inner]
    content: bytes
    path: epath.Path | None
    color: Color
    axes: tuple[str | tuple[str, ...] | None, ...]


INNER = Inner(numbers=(1, 2), pair=("a", 0.5))
OUTER = Outer(
    inner=INNER,
    by_name={"x": INNER},
    content=b"\0\xff",
    path=epath.Path("gs://bucket/file"),
    color=Color.BLUE,
    axes=("a", None, ("b", "c")),
)


def test_nested_values_come_back_as_they_were():
    for value in (OUTER, dataclasses.replace(OUTER, inner=None, by_name={})):
        encoded = json.loads(json.dumps(codec.encode(value)))
        assert codec.decode(Outer, encoded) == value


def spoilt(change):
    encoded = codec.encode(OUTER)
    change(encoded)
    return encoded


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda e: e.pop("inner"), "value has the fields"),
        (lambda e: e.update(more=1), "value has the fields"),
        (lambda e: e["by_name"]["x"].pop("pair"), r"value.by_name\['x'\] has"),
        (lambda e: e["inner"].update(numbers=["1"]), r"numbers\[0\] is a str, not"),
        (lambda e: e["inner"].update(numbers=[True]), "is a bool, not a int"),
        (lambda e: e["inner"].update(pair=["a"]), "pair has 1 elements, not 2"),
        (lambda e: e.update(by_name=[]), "by_name is a list, not a dict"),
        (lambda e: e.update(color="green"), "value.color: 'green' is not"),
        (lambda e: e.update(content="?"), "value.content: "),
        (lambda e: e.update(path=1), "is a int, not a str"),
        (lambda e: e.update(axes=[1]), "is a int, not a str; .*not a list; .*NoneType"),
    ],
)
def test_what_is_not_of_the_declared_type_is_refused(change, why):
    with pytest.raises(codec.DecodingError, match=why):
        codec.decode(Outer, spoilt(change))


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {3}}])
def test_what_has_no_encoding_is_refused(value):
    with pytest.raises(TypeError):
        codec.encode(value)


def test_a_type_that_has_no_encoding_is_refused():
    with pytest.raises(TypeError, match="no encoding"):
        codec.decode(set, [])


def test_whole_numbers_of_other_programs_are_numbers():
    assert codec.decode(float, 1) == 1.0
