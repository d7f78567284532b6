"""The equations that the tensors of an instance give for the sizes of named dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from elastic_ckpt.universal.rules import dims, sizes
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.relation import ParsedTensor, Relation
from elastic_ckpt.universal.rules.rows import Row


def equations(
    relation: Relation, listed: Sequence[Sequence[Row]], counts: Mapping[str, int]
) -> Iterator[sizes.Equation]:
    """The equations of shapes, then those of captures, tables and rank axes.

    Args:
      relation: the rule.
      listed: the tensors of both sides.
      counts: the number of ranks, by axis.

    Raises:
      LayoutError: if a tensor has another number of dims.
    """
    seen = set()
    numbers: dict[tuple[str, tuple[str, ...]], int] = {}
    for tensors, side in zip((relation.sources, relation.targets), listed, strict=True):
        for row in side:
            tensor = tensors[row.tensor]
            ranks: dict[str, tuple[int, int]] = {}
            if tensor.dims.axes:
                ranks = {
                    axis: (int(number), counts[axis])
                    for axis, number in (*row.ranks, *_captured_axes(row))
                    if axis in tensor.dims.axes
                }
            for names, value in row.captured:
                if tensor.points.issuperset(names):
                    key = (tensor.place, names)
                    numbers[key] = max(numbers.get(key, 0), int(value) + 1)
            key = (id(tensor), row.shape, tuple(sorted(ranks.items())))
            if key not in seen:
                seen.add(key)
                yield from _shape_equations(tensor, row, ranks)
    for (place, names), number in numbers.items():
        node = dims.Product(tuple(map(dims.Name, names)))
        text = " ".join(names)
        origin = f"the number of values of {{{text}}} in {place}"
        yield sizes.Equation(node=node, length=number, ranks={}, origin=origin)
    for tensor in (*relation.sources, *relation.targets):
        for key, (_, table) in tensor.tables.items():
            origin, number = f"the index of {key}", len(table)
            node = dims.Name(key)
            yield sizes.Equation(node=node, length=number, ranks={}, origin=origin)
    for pair in relation.pairs:
        tensor = relation.sources[pair.source.tensor]
        for axis in sorted(pair.source.points - tensor.points):
            origin = f"the number of ranks of {axis}"
            node = dims.Name(axis)
            yield sizes.Equation(
                node=node, length=counts[axis], ranks={}, origin=origin
            )


def _captured_axes(row: Row) -> Iterator[tuple[str, int | str]]:
    return ((names[0], value) for names, value in row.captured if len(names) == 1)


def _shape_equations(
    tensor: ParsedTensor, row: Row, ranks: Mapping[str, tuple[int, int]]
) -> Iterator[sizes.Equation]:
    nodes = tensor.dims.nodes
    if len(nodes) != len(row.shape):
        raise LayoutError(
            f"{tensor.place}: {row.name!r} has shape {list(row.shape)}, the rule "
            f"describes {len(nodes)} dims: {tensor.dims.text!r}"
        )
    for dim, (node, length) in enumerate(zip(nodes, row.shape, strict=True)):
        origin = f"dim {dim} of {row.name!r} ({tensor.dims.text!r})"
        yield sizes.Equation(node=node, length=length, ranks=ranks, origin=origin)
