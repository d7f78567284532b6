"""Random layouts: from A to B as each element's coordinates define it, and back.

The oracle decodes the coordinates of each element of each tensor, one by one.
"""

import contextlib
import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.rules.layout import Layout, LayoutError
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
def relations(draw):
    """The values of all parts, and the tensors of both sides."""
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
    both = [draw(sides(names, parts, axis)) for axis in ("r", "s")]
    sizes = {each.name: each.size for each in [*names, *parts]}
    return values_of, sizes, both


FILL = {"step": {"value": ["absent", "iteration"]}}


def layout_of(sizes, both, ranked=False):
    written = {
        key: {each.pattern(ranked and key == "from"): dims_of(each) for each in side}
        for key, side in zip(("from", "to"), both, strict=True)
    }
    fields = {"version": 1, "sizes": sizes, "rules": [written], "fill": FILL}
    text = json.dumps(fields)
    return Layout.parse(text)


def dims_of(tensor):
    return " ".join(map(str, tensor.dims))


def arrays_of(side, values_of, **options):
    listed = [each.arrays(values_of, False, **options) for each in side]
    return {name: values for name, values, _ in itertools.chain(*listed)}


@given(relations())
def test_tensors_go_from_one_layout_to_another_and_back(relation):
    values_of, sizes, both = relation
    layout = layout_of(sizes, both)
    a, b = (arrays_of(side, values_of) for side in both)
    made = relayout(layout, a, targets=b)
    assert_same(made, b)
    assert_same(relayout(layout.inverse(), made, targets=a), a)


@given(relations(), st.data())
def test_nothing_is_left_out_without_an_error(relation, data):
    values_of, sizes, both = relation
    layout = layout_of(sizes, both)
    a, b = (arrays_of(side, values_of) for side in both)
    side = data.draw(st.sampled_from([a, b]))
    missing = data.draw(st.sampled_from(sorted(side)))
    del side[missing]
    with pytest.raises(LayoutError):
        relayout(layout, a, targets=b)


@given(relations())
def test_shards_of_ranks_become_whole_tensors_and_back(relation):
    values_of, sizes, both = relation
    layout = layout_of(sizes, both, ranked=True)
    tensors = [
        saved(name, values, **ranks)
        for each in both[0]
        for name, values, ranks in each.arrays(values_of, True)
    ]
    axes = {axis: count for each in both[0] for axis, count in each.axes.items()}
    b = arrays_of(both[1], values_of)
    made = relayout(layout, tensors, axes, targets=b)
    assert_same(made, b)
    whole = {
        name: values
        for each in both[0]
        for name, values, _ in each.arrays(values_of, True, whole=True)
    }
    assert_same(relayout(layout.inverse(), made), whole)


@given(relations(), st.data())
def test_one_size_is_solved_from_the_shapes(relation, data):
    values_of, sizes, both = relation
    if sizes:
        del sizes[data.draw(st.sampled_from(sorted(sizes)))]
    a, b = (arrays_of(side, values_of) for side in both)
    assert_same(relayout(layout_of(sizes, both), a, targets=b), b)


def from_values(sizes):
    """Sizes that refer to values of the checkpoint, and these values."""
    paths = {name: {"value": ["absent", f"args/{name}"]} for name in sizes}
    return paths, {f"args/{name}": size for name, size in sizes.items()}


@given(relations(), st.data())
def test_sizes_and_steps_are_values_of_the_checkpoint(relation, data):
    values_of, sizes, both = relation
    paths, values = from_values(sizes)
    given = data.draw(st.sets(st.sampled_from(sorted(sizes)))) if sizes else ()
    written = layout_of({**paths, **{name: sizes[name] for name in given}}, both)
    values["iteration"] = data.draw(st.integers(-(2**31), 2**31 - 1))
    layout = written.with_values(values)
    a, b = (arrays_of(side, values_of) for side in both)
    b["step"] = np.int32(values["iteration"])
    made = relayout(layout, a, targets=b)
    assert_same(made, b)
    assert_same(relayout(layout.inverse(), made, targets=a), a)


@given(relations(), st.data())
def test_sizes_that_are_no_values_are_solved_or_named(relation, data):
    values_of, sizes, both = relation
    paths, values = from_values(sizes)
    absent = data.draw(st.sets(st.sampled_from(sorted(sizes)))) if sizes else ()
    for name in absent:
        del values[f"args/{name}"]
    a, b = (arrays_of(side, values_of) for side in both)
    layout = layout_of(paths, both).with_values(values)
    if len(absent) < 2:
        assert_same(relayout(layout, a, targets=b), b)
        return
    with contextlib.suppress(LayoutError):
        assert_same(relayout(layout, a, targets=b), b)
        return
    listed = [f"sizes['{x}']: the checkpoint has no value absent or" for x in absent]
    with pytest.raises(LayoutError, match="layout: sizes") as caught:
        relayout(layout, a, targets=b)
    assert any(each in str(caught.value) for each in listed)


@pytest.mark.night
@given(relations(), st.sampled_from([None, "x", 2**60, 0.5, float("nan")]))
def test_a_step_that_is_missing_or_cannot_be_had_is_refused(relation, value):
    values_of, sizes, both = relation
    a, b = (arrays_of(side, values_of) for side in both)
    b["step"] = np.int32(0)
    with pytest.raises(LayoutError, match=r"iteration|step is of int32"):
        relayout(layout_of(sizes, both).with_values({"iteration": value}), a, targets=b)
