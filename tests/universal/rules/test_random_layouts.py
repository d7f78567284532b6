"""Random layouts: from A to B as each element's coordinates define it, and back.

The oracle decodes the coordinates of each element of each tensor, one by one.
`RANDOM_LAYOUTS=10000` tries as many layouts.
"""

import dataclasses
import itertools
import math
import os
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal.rules.relayout import assert_same, relayout, saved


@dataclasses.dataclass(frozen=True)
class Name:
    name: str
    size: int

    def __str__(self):
        return self.name

    def length(self, _ranks):
        return self.size

    def decode(self, at, _ranks):
        return {self.name: at}


@dataclasses.dataclass(frozen=True)
class Product:
    factors: tuple[Any, ...]

    def __str__(self):
        return f"({' '.join(map(str, self.factors))})" if self.factors else "1"

    def length(self, ranks):
        return math.prod(factor.length(ranks) for factor in self.factors)

    def decode(self, at, ranks):
        values = {}
        for factor in reversed(self.factors):
            at, index = divmod(at, factor.length(ranks))
            values |= factor.decode(index, ranks)
        return values


@dataclasses.dataclass(frozen=True)
class Sum:
    addends: tuple[Any, ...]

    def __str__(self):
        texts = [str(each).removeprefix("(").removesuffix(")") for each in self.addends]
        return f"({' + '.join(texts)})"

    def length(self, ranks):
        return sum(addend.length(ranks) for addend in self.addends)

    def decode(self, at, ranks):
        for addend in self.addends:
            if at < addend.length(ranks):
                return addend.decode(at, ranks)
            at -= addend.length(ranks)
        raise IndexError


@dataclasses.dataclass(frozen=True)
class Shard:
    node: Any
    axis: str
    count: int

    def __str__(self):
        return f"{self.node}@{self.axis}"

    def length(self, ranks):
        return self.node.length(ranks) // ranks[self.axis][1]

    def decode(self, at, ranks):
        rank = ranks[self.axis][0]
        return self.node.decode(rank * self.length(ranks) + at, ranks)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A pattern; `captures` are products of names, `axes` the ranks by axis."""

    number: int
    captures: tuple[Product, ...]
    dims: tuple[Any, ...]
    axes: dict[str, int]

    def pattern(self, ranked):
        captures = [
            f"{{{each if len(each.factors) > 1 else each.factors[0]}}}"
            for each in self.captures
        ]
        axes = [] if ranked else [f"{{{axis}}}" for axis in self.axes]
        return f"{self.number}/{{kept}}/" + "_".join([*captures, *axes, "w"])

    def arrays(self, values_of, ranked, whole=False):
        """All tensors of the pattern: name, values and ranks."""
        counts = {axis: 1 if whole else count for axis, count in self.axes.items()}
        for kept in ("x", "y2"):
            lengths = [each.length({}) for each in self.captures]
            for captured in np.ndindex(*lengths):
                for at in np.ndindex(*counts.values()):
                    ranks = dict(zip(counts, at, strict=True))
                    texts = [*map(str, captured), *([] if ranked else map(str, at))]
                    values = self._values(values_of[kept], captured, ranks, counts)
                    name = f"{self.number}/{kept}/" + "_".join([*texts, "w"])
                    yield name, values, ranks

    def _values(self, values_of, captured, ranks, counts):
        scope = {axis: (rank, counts[axis]) for axis, rank in ranks.items()}
        shape = [node.length(scope) for node in self.dims]
        values = np.zeros(shape, np.float32)
        points = {}
        for capture, number in zip(self.captures, captured, strict=True):
            points |= capture.decode(number, {})
        for at in np.ndindex(*shape):
            coordinates = dict(points)
            for node, index in zip(self.dims, at, strict=True):
                coordinates |= node.decode(index, scope)
            array, names = values_of[frozenset(coordinates)]
            values[at] = array[tuple(coordinates[name] for name in names)]
        return values


@st.composite
def sides(draw, names, parts, axis):
    """Tensors that together have each part with all `names` once."""
    fused = not parts or draw(st.booleans())
    tensors = []
    for number, group in enumerate([parts] if fused else [[part] for part in parts]):
        order = draw(st.permutations(names))
        captured = draw(st.integers(0, min(2, len(order))))
        captures, factors = order[:captured], list(order[captured:])
        if captures and draw(st.booleans()):
            captures = [Product(tuple(captures))]
        else:
            captures = [Product((each,)) for each in captures]
        if len(group) > 1:
            inner = tuple(factors[:1]) if draw(st.booleans()) else ()
            addends = [Product((part, *inner)) for part in group]
            factors = [*factors[len(inner) :], Sum(tuple(addends))]
        else:
            factors = [*factors, *group]
        factors = draw(st.permutations(factors))
        dims, axes = [], {}
        while factors:
            count = draw(st.integers(0, len(factors)))
            chosen, factors = factors[:count], factors[count:]
            node = chosen[0] if count == 1 else Product(tuple(chosen))
            if draw(st.booleans()):
                ranks = draw(st.integers(1, 3))
                if node.length({}) % ranks == 0:
                    name = f"{axis}{number}{len(axes)}"
                    node = Shard(node, name, ranks)
                    axes[name] = ranks
            dims.append(node)
            if len(dims) > 5:
                dims += factors
                break
        tensors.append(
            Tensor(number=number, captures=tuple(captures), dims=tuple(dims), axes=axes)
        )
    return tensors


@st.composite
def relations(draw, axes="rs"):
    """The values of all parts, their sizes, and tensors that have them in some ways."""
    count = draw(st.integers(0, 3))
    names = [Name(name, draw(st.integers(1, 3))) for name in "abcd"[:count]]
    number_of_parts = draw(st.sampled_from([0, 2, 3]))
    parts = [Name(f"p{n}", draw(st.integers(1, 3))) for n in range(number_of_parts)]
    values_of, start = {}, 0
    for kept in ("x", "y2"):
        values_of[kept] = {}
        for part in parts or [None]:
            listed = [*names, *([part] if part else [])]
            shape = [each.size for each in listed]
            key = frozenset(each.name for each in listed)
            array = np.arange(start, start + math.prod(shape), dtype=np.float32)
            values_of[kept][key] = array.reshape(shape), [each.name for each in listed]
            start += array.size
    ways = [draw(sides(names, parts, axis)) for axis in axes]
    return values_of, {each.name: each.size for each in [*names, *parts]}, ways


def layout_of(sizes, both, ranked=False, **keys):
    written = {
        key: {
            each.pattern(ranked and key == "from"): " ".join(map(str, each.dims))
            for each in side
        }
        for key, side in zip(("from", "to"), both, strict=True)
    }
    return Layout.from_dict({"sizes": sizes, "rules": [written], **keys})


def arrays_of(side, values_of, **options):
    listed = [each.arrays(values_of, False, **options) for each in side]
    return {name: values for name, values, _ in itertools.chain(*listed)}


def many(test):
    """Tries as many examples as the environment asks for."""
    count = os.environ.get("RANDOM_LAYOUTS")
    return hypothesis.settings(max_examples=int(count))(test) if count else test


@many
@given(relations(), st.data())
def test_tensors_go_from_one_layout_to_another_and_back(relation, data):
    values_of, sizes, both = relation
    a, b = (arrays_of(side, values_of) for side in both)
    # Some sizes are values of the checkpoint, and shapes tell one that is nowhere.
    values = {f"args/{name}": size for name, size in sizes.items()}
    written = {
        name: data.draw(st.sampled_from([size, {"value": ["x", f"args/{name}"]}]))
        for name, size in sizes.items()
    }
    if sizes and data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(sizes)))
        if data.draw(st.booleans()):
            del written[name]
        else:
            del values[f"args/{name}"]
    layout = layout_of(written, both, fill={"step": {"value": "step"}})
    layout = layout.with_values({**values, "step": 7})
    b["step"] = np.int32(7)
    made = relayout(layout, a, targets=b)
    assert_same(made, b)
    back = layout.inverse().with_values(values)
    assert_same(relayout(back, made, targets=a), a)


@many
@given(relations(), st.data())
def test_nothing_is_left_out_without_an_error(relation, data):
    values_of, sizes, both = relation
    a, b = (arrays_of(side, values_of) for side in both)
    side = data.draw(st.sampled_from([a, b]))
    del side[data.draw(st.sampled_from(sorted(side)))]
    with pytest.raises(LayoutError):
        relayout(layout_of(sizes, both), a, targets=b)


@many
@given(relations())
def test_shards_of_ranks_become_whole_tensors_and_back(relation):
    values_of, sizes, both = relation
    layout = layout_of(sizes, both, ranked=True)
    every = [each.arrays(values_of, True) for each in both[0]]
    tensors = [saved(name, array, **of) for name, array, of in itertools.chain(*every)]
    axes = {axis: count for each in both[0] for axis, count in each.axes.items()}
    b = arrays_of(both[1], values_of)
    made = relayout(layout, tensors, axes, targets=b)
    assert_same(made, b)
    every = [each.arrays(values_of, True, whole=True) for each in both[0]]
    whole = {name: array for name, array, _ in itertools.chain(*every)}
    assert_same(relayout(layout.inverse(), made), whole)


@many
@given(relations("rst"))
def test_two_layouts_make_what_the_second_makes_of_the_first(relation):
    values_of, sizes, (one, two, three) = relation
    ranks = {axis: n for each in two for axis, n in each.axes.items()}
    first = layout_of(sizes, [one, two], ranks=ranks)
    second = layout_of(sizes, [two, three])
    back = layout_of(sizes, [three, two], ranks=ranks), layout_of(sizes, [two, one])
    a, c = arrays_of(one, values_of), arrays_of(three, values_of)
    for layouts, tensors, targets in (((first, second), a, c), (back, c, a)):
        try:
            made = relayout(Layout(rules=(), through=layouts), tensors, targets=targets)
        except LayoutError as error:
            if "regroup a dim" not in str(error):
                raise
        else:
            assert_same(made, targets)


def test_a_layout_between_whole_tensors_is_composed():
    names, parts = [Name("a", 2), Name("b", 3)], [Name("p", 2), Name("q", 1)]
    whole = [Tensor(n, (), (*names, part), {}) for n, part in enumerate(parts)]
    dims = (names[1], Product((names[0], Sum((parts[0], parts[1])))))
    fused = [Tensor(0, (), dims, {})]
    sizes = {each.name: each.size for each in (*names, *parts)}
    values_of = {
        kept: {
            frozenset(("a", "b", part.name)): (
                np.arange(6.0 * part.size, dtype=np.float32).reshape(2, 3, part.size),
                ["a", "b", part.name],
            )
            for part in parts
        }
        for kept in ("x", "y2")
    }
    through = layout_of(sizes, [fused, whole]), layout_of(sizes, [whole, fused])
    arrays = arrays_of(fused, values_of)
    assert_same(relayout(Layout(rules=(), through=through), arrays), arrays)
