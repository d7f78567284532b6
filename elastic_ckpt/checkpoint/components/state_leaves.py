"""The leaves of an encoded state by path, in which all of it can be compared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from elastic_ckpt.checkpoint.components.encoding import Encoded

Leaf = bool | int | float | str | bytes | np.ndarray


def leaves(encoded: Encoded) -> dict[str, Leaf]:
    """The leaves of a state by path, such as `groups/0/lr`.

    Two states have equal leaves if they are equal. The class and length of a container
    are a leaf too, under its path.
    """
    by_path: dict[str, Leaf] = {}
    for names, leaf in _walk(encoded.tree, encoded, ()):
        path = "/".join(names)
        while path in by_path:
            # Keys of a dict may differ in their type alone, or contain slashes.
            path += "'"
        by_path[path] = leaf
    return by_path


def _walk(
    node: Any, encoded: Encoded, names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Leaf]]:
    children: list[tuple[Any, Any]] = []
    if isinstance(node, list):
        leaf: Leaf = f"a list of {len(node)}"
        children = list(enumerate(node))
    elif not isinstance(node, dict):
        leaf = b"null" if node is None else node
    else:
        kind = next(iter(node))
        content = node[kind]
        if kind == "tuple":
            leaf = f"a tuple of {len(content)}"
            children = list(enumerate(content))
        elif kind == "dict":
            leaf = f"a dict of {len(content)}"
            children = content
        elif kind == "node":
            leaf = content
            children = [(name.strip(".[]'"), each) for name, each in node["children"]]
        elif kind in ("float", "bytes"):
            leaf = f"{kind} {content}"
        else:
            yield (*names, "kind"), f"{kind} {node.get('impl', '')}"
            leaf = encoded.arrays[content]
    yield names, leaf
    for name, child in children:
        yield from _walk(child, encoded, (*names, str(name)))
