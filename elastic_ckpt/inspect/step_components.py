"""The components of a step, as its manifests list them: pytrees, and parts with files.

Only the file of a component that describes it is read, and verified; values are not.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from elastic_ckpt.checkpoint.components import sharing
from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.core import digest, errors
from elastic_ckpt.steps import search
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.tiers.source import Source

# The file of a component that describes itself, and files with the version of others.
_DESCRIPTION = "component.json"
_OTHERS = ("data_state.json", "callbacks.json")
_BY_SHARDING = "by sharding"
_OWN = "its own files"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepComponent:
    """A part of a step: a pytree or a component.

    Attributes:
      name: of the part.
      pattern: how hosts share it: `global`, `per_host` and so on as it was saved; for
        a pytree it follows from the shardings of its arrays.
      resize: what becomes of it when the number of hosts changes: the rule that the
        program which saved it declared, a function's by its name.
      required: whether that program declared it as required; None if it is not known,
        as for a pytree.
      version: of the format of its files; None if none of them has one.
      num_leaves: arrays and numbers, of a pytree.
      num_files: of a component.
      num_bytes: of one copy of all.
      digest: of the digests of all its parts: equal if they are equal, and cut alike.
      hosts: the ids of the hosts that hold something of it, ordered.
    """

    name: str
    pattern: str
    resize: str
    required: bool | None
    version: int | None
    num_leaves: int
    num_files: int
    num_bytes: int
    digest: str
    hosts: tuple[str, ...]


def components(
    step: search.Step, copies: Mapping[Offer, Source]
) -> tuple[StepComponent, ...]:
    """The components of a step by name. A step without all of them is incomplete.

    Args:
      step: the save of it.
      copies: the holders of its parts.
    """
    holdings = step.holdings
    # Leaves without elements, and components without files, have no items.
    num_leaves = collections.Counter(
        leaf.path.partition("/")[0] for leaf in holdings.contents.leaves
    )
    items: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    items |= {name: [] for name in (*num_leaves, *holdings.contents.components)}
    for item in range(holdings.num_items):
        items[_component(holdings, item)].append(item)
    return tuple(
        _described(holdings, name, items[name], num_leaves[name], copies)
        for name in sorted(items)
    )


def _described(
    holdings: Holdings,
    name: str,
    items: list[int],
    num_leaves: int,
    copies: Mapping[Offer, Source],
) -> StepComponent:
    fields = _description(holdings, name, copies)
    is_tree = name not in holdings.contents.components
    pattern = sharing.of_saved(fields.get("pattern", _BY_SHARDING if is_tree else _OWN))
    resize = "its own rule" if pattern == _OWN else "none needed"
    if pattern in ("per_host", "per_node", "per_group"):
        # Older descriptions have no rule.
        resize = fields.get("on_resize") or "by the rule of the program that loads it"
    return StepComponent(
        name=name,
        pattern=" ".join([pattern, "+".join(fields.get("axes") or ())]).strip(),
        resize=resize,
        required=fields.get("required"),
        version=fields.get("version"),
        num_leaves=num_leaves,
        num_files=sum(item >= len(holdings.leaf) for item in items),
        num_bytes=int(holdings.stored_bytes[np.array(items, int)].sum()),
        digest=digest.json_digest([_part(holdings, item) for item in items]),
        hosts=tuple(
            sorted({o.host.id for item in items for o in holdings.holders(item)})
        ),
    )


def _component(holdings: Holdings, item: int) -> str:
    if item >= len(holdings.leaf):
        return holdings.files[item - len(holdings.leaf)].component
    path = holdings.contents.leaves[int(holdings.leaf[item])].path
    return path.partition("/")[0]


def _part(holdings: Holdings, item: int) -> list[str]:
    if item >= len(holdings.leaf):
        checksum = holdings.files[item - len(holdings.leaf)].digest
    else:
        checksum = holdings.fragment(int(holdings.first_row[item])).digest
    return [holdings.name(item), checksum.hex()]


def _description(
    holdings: Holdings, name: str, copies: Mapping[Offer, Source]
) -> dict[str, Any]:
    numbers = {file.path: number for number, file in enumerate(holdings.files)}
    for kind in (_DESCRIPTION, *_OTHERS):
        number = numbers.get(f"{name}/{kind}")
        if number is None:
            continue
        offers = holdings.holders(len(holdings.leaf) + number)
        reader = verified_read.VerifiedReader({each: copies[each] for each in offers})
        try:
            fields = json.loads(reader.file(holdings.files[number], offers))
        except (errors.CheckpointError, ValueError):
            # Verification names what is wrong with a file.
            return {"pattern": "unreadable"}
        if not isinstance(fields, dict):
            return {}
        return fields if kind == _DESCRIPTION else {"version": fields.get("version")}
    return {}
