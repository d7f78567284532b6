"""The target tensors that the sources of a rule make, where no target is given."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from elastic_ckpt.universal.rules import geometry
from elastic_ckpt.universal.rules.geometry import Scope
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.name_pattern import NamePattern
from elastic_ckpt.universal.rules.relation import ParsedTensor, Relation
from elastic_ckpt.universal.rules.rows import Kept, Row

# An empty tensor may have dims of any size, and cost no bytes.
MOST_NAMES = 1 << 17


def derived(
    relation: Relation,
    kept: Kept,
    names: Sequence[NamePattern],
    *,
    sizes: Mapping[str, int],
    counts: Mapping[str, int],
) -> Iterator[Row]:
    """The targets of an instance, without dtypes.

    Args:
      relation: the rule.
      kept: the values of the captures that all names have.
      names: the whole names of the targets, by the number of the pattern.
      sizes: of all dims.
      counts: the number of ranks, by axis.

    Raises:
      LayoutError: if the number of values of a capture is not known, or there would
        be more than `MOST_NAMES` tensors of a pattern.
    """
    known = {**counts, **sizes}
    for number, tensor in enumerate(relation.targets):
        captures = [
            capture.names
            for capture in tensor.name.captures
            if capture.names[0] not in relation.kept
        ]
        for chosen in _choices(tensor, list(itertools.chain(*captures)), known):
            captured = tuple(
                (names, _number(names, chosen, known)) for names in captures
            )
            ranks = {
                axis: (chosen[axis], counts[axis])
                for axis in tensor.dims.axes & chosen.keys()
            }
            scope = Scope(sizes=sizes, ranks=ranks, widths=relation.rule.widths)
            lengths = [geometry.length(node, scope) for node in tensor.dims.nodes]
            yield Row(
                tensor=number,
                name=names[number].format({**relation.named(kept), **dict(captured)}),
                captured=captured,
                ranks=(),
                shape=tuple(map(int, lengths)),
                dtype=None,
            )


def _choices(
    tensor: ParsedTensor, captured: Sequence[str], known: Mapping[str, int]
) -> list[dict[str, int]]:
    # All values of the names `captured`.
    choices: list[dict[str, int]] = [{}]
    for by, table in tensor.tables.values():
        entries = [dict(zip(by, at, strict=True)) for at in table]
        choices = [{**chosen, **entry} for chosen in choices for entry in entries]
    for name in captured:
        if name in choices[0]:
            continue
        if name not in known:
            raise LayoutError(
                f"{tensor.place}: the number of values of {{{name}}} is not known; "
                f"give it in `sizes`"
            )
        if len(choices) * known[name] > MOST_NAMES:
            raise LayoutError(
                f"{tensor.place}: {len(choices) * known[name]} tensors would be made "
                f"of the {known[name]} values of {name}, and at most {MOST_NAMES} are; "
                f"use the right checkpoint, or another layout"
            )
        choices = [
            {**chosen, name: at} for chosen in choices for at in range(known[name])
        ]
    return choices


def _number(
    names: Sequence[str], chosen: Mapping[str, int], known: Mapping[str, int]
) -> int:
    # The row-major index of the chosen values.
    number = chosen[names[0]]
    for name in names[1:]:
        number = number * known[name] + chosen[name]
    return number
