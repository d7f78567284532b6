"""The components of a step, as its manifests list them: pytrees, and parts with files.

Only the file of a component that describes it is read, and verified; values are not.
"""

from __future__ import annotations

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
    items: dict[str, list[int]] = {}
    for item in range(holdings.num_items):
        items.setdefault(_component(holdings, item), []).append(item)
    num_leaves: dict[str, int] = dict.fromkeys(items, 0)
    for leaf in holdings.contents.leaves:
        name = leaf.path.partition("/")[0]
        # Leaves without elements have no items.
        items.setdefault(name, [])
        num_leaves[name] = num_leaves.get(name, 0) + 1
    for name in holdings.contents.components:
        items.setdefault(name, [])
    return tuple(
        _described(holdings, name, items[name], num_leaves.get(name, 0), copies)
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
    hosts = {offer.host.id for item in items for offer in holdings.holders(item)}
    pattern = sharing.of_saved(fields.get("pattern", _BY_SHARDING if is_tree else _OWN))
    axes = fields.get("axes")
    return StepComponent(
        name=name,
        pattern=f"{pattern} {'+'.join(axes)}" if axes else pattern,
        resize=_resize(pattern, fields.get("on_resize")),
        required=fields.get("required"),
        version=fields.get("version"),
        num_leaves=num_leaves,
        num_files=sum(item >= len(holdings.leaf) for item in items),
        num_bytes=int(holdings.stored_bytes[np.array(items, int)].sum()),
        digest=digest.json_digest([_part(holdings, item) for item in items]),
        hosts=tuple(sorted(hosts)),
    )


def _resize(pattern: str, rule: str | None) -> str:
    if pattern in ("per_host", "per_node", "per_group"):
        # Older descriptions have no rule.
        return rule or "by the rule of the program that loads it"
    return "none needed" if pattern != _OWN else "its own rule"


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
        reader = verified_read.VerifiedReader(
            {offer: copies[offer] for offer in offers}
        )
        try:
            content = json.loads(reader.file(holdings.files[number], offers))
        except (errors.CheckpointError, ValueError):
            # Verification names what is wrong with a file.
            return {"pattern": "unreadable"}
        fields = content if isinstance(content, dict) else {}
        return fields if kind == _DESCRIPTION else {"version": fields.get("version")}
    return {}
