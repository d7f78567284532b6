"""Random layouts: the elements of two sides, as the coordinates of each define them.

The coordinates of each element of each tensor are decoded one by one.
"""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

from elastic_ckpt.universal.rules.dims import Name, Product, Shard, Sum
from elastic_ckpt.universal.rules.layout import Layout
from tests.universal.rules.relayout import saved


def text(node):
    """A node as it is written."""
    if isinstance(node, Name):
        return node.name
    if isinstance(node, Shard):
        return f"{text(node.parts[0])}@{node.axes[0]}"
    if isinstance(node, Product):
        return f"({' '.join(map(text, node.parts))})" if node.parts else "1"
    addends = [text(each).removeprefix("(").removesuffix(")") for each in node.parts]
    return f"({' + '.join(addends)})"


def length(node, sizes, ranks):
    """The length of a node on a rank."""
    if isinstance(node, Name):
        return sizes[node.name]
    lengths = [length(each, sizes, ranks) for each in node.parts]
    if isinstance(node, Shard):
        return lengths[0] // ranks[node.axes[0]][1]
    return math.prod(lengths) if isinstance(node, Product) else sum(lengths)


def decoded(node, at, sizes, ranks):
    """The coordinates of an index of a node."""
    if isinstance(node, Name):
        return {node.name: at}
    if isinstance(node, Shard):
        at += ranks[node.axes[0]][0] * length(node, sizes, ranks)
        return decoded(node.parts[0], at, sizes, ranks)
    found = {}
    if isinstance(node, Product):
        for factor in reversed(node.parts):
            at, index = divmod(at, length(factor, sizes, ranks))
            found |= decoded(factor, index, sizes, ranks)
        return found
    for addend in node.parts:
        if at < length(addend, sizes, ranks):
            return decoded(addend, at, sizes, ranks)
        at -= length(addend, sizes, ranks)
    raise IndexError


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A pattern; `captures` are products of names, `axes` the ranks by axis."""

    number: int
    captures: tuple[Product, ...]
    dims: tuple[Any, ...]
    axes: dict[str, int]

    def pattern(self, ranked):
        captures = [
            f"{{{text(each if len(each.parts) > 1 else each.parts[0])}}}"
            for each in self.captures
        ]
        axes = [] if ranked else [f"{{{axis}}}" for axis in self.axes]
        return f"{self.number}.{{kept}}." + "_".join([*captures, *axes, "w"])

    def saved(self, values_of, sizes, ranked, whole=False):
        """All tensors of the pattern; they have ranks in place of names of ranks."""
        lengths = [length(each, sizes, {}) for each in self.captures]
        counts = [1 if whole else count for count in self.axes.values()]
        for kept, *at in itertools.product(
            ("x", "y2"), *map(range, [*lengths, *counts])
        ):
            captured, places = at[: len(lengths)], at[len(lengths) :]
            ranks = dict(zip(self.axes, zip(places, counts, strict=True), strict=True))
            shape = [length(each, sizes, ranks) for each in self.dims]
            values = np.zeros(shape, np.float32)
            for index in np.ndindex(*shape):
                found = {}
                nodes = (*self.captures, *self.dims)
                for node, of_node in zip(nodes, (*captured, *index), strict=True):
                    found |= decoded(node, of_node, sizes, ranks)
                array, names = values_of[kept][frozenset(found)]
                values[index] = array[tuple(found[name] for name in names)]
            texts = map(str, captured if ranked else at)
            name = f"{self.number}.{kept}." + "_".join([*texts, "w"])
            held = zip(self.axes, places, strict=True) if ranked else ()
            yield saved(name, values, **dict(held))


@st.composite
def sides(draw, sizes, names, parts, axis, most_captured):
    """Tensors that together have each part with all `names` once."""
    tensors = []
    fused = not parts or draw(st.booleans())
    for number, group in enumerate([parts] if fused else [[part] for part in parts]):
        order = [Name(each) for each in draw(st.permutations(names))]
        captured = draw(st.integers(0, min(most_captured, len(order))))
        captures, factors = order[:captured], order[captured:]
        joined = (
            [captures] if captures and draw(st.booleans()) else [[e] for e in captures]
        )
        captures = tuple(Product(tuple(each)) for each in joined)
        if len(group) > 1:
            inner = tuple(factors[:1]) if draw(st.booleans()) else ()
            addends = tuple(Product((Name(part), *inner)) for part in group)
            factors = [*factors[len(inner) :], Sum(addends)]
        else:
            factors += map(Name, group)
        factors = draw(st.permutations(factors))
        dims, axes = [], {}
        while factors:
            count = draw(st.integers(0, len(factors)))
            chosen, factors = factors[:count], factors[count:]
            node = chosen[0] if count == 1 else Product(tuple(chosen))
            ranks = draw(st.integers(0, 3))
            if ranks and length(node, sizes, {}) % ranks == 0:
                name = f"{axis}{number}{len(axes)}"
                node, axes[name] = Shard((node,), (name,)), ranks
            dims.append(node)
            if len(dims) > 5:
                dims += factors
                break
        tensors.append(Tensor(number, captures, tuple(dims), axes))
    return tensors


@st.composite
def relations(draw, axes="rs", least_names=0, most_captured=2):
    """The values of all parts, their sizes, and tensors that have them in some ways."""
    names = "abcd"[: draw(st.integers(least_names, 3))]
    parts = [f"p{n}" for n in range(draw(st.sampled_from([0, 2, 3])))]
    sizes = {name: draw(st.integers(1, 3)) for name in (*names, *parts)}
    values_of, start = {"x": {}, "y2": {}}, 0
    for kept, part in itertools.product(values_of, parts or [""]):
        listed = [*names, *([part] if part else [])]
        shape = [sizes[name] for name in listed]
        array = np.arange(start, start + math.prod(shape), dtype=np.float32)
        values_of[kept][frozenset(listed)] = array.reshape(shape), listed
        start += array.size
    drawn = [sides(sizes, names, parts, each, most_captured) for each in axes]
    return values_of, sizes, [draw(each) for each in drawn]


def layout_of(sizes, both, ranked=False, **keys):
    written = {
        key: {
            each.pattern(ranked and key == "from"): " ".join(map(text, each.dims))
            for each in side
        }
        for key, side in zip(("from", "to"), both, strict=True)
    }
    return Layout.from_dict({"sizes": sizes, "rules": [written], **keys})


def saved_of(side, values_of, sizes, ranked=False, whole=False):
    listed = [each.saved(values_of, sizes, ranked, whole) for each in side]
    return [*itertools.chain(*listed)]


def arrays_of(side, values_of, sizes):
    return {each.name: each.values for each in saved_of(side, values_of, sizes)}
