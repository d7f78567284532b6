"""Limits the size of values whose parts may be shared: as if each were copied."""

from __future__ import annotations

from typing import Any

from elastic_ckpt.universal.formats.format_error import FormatError

# Shared parts count as often as they are referred to.
MOST_NODES = 2_000_000
MOST_NESTED = 100

_CONTAINERS = (dict, list, tuple, set, frozenset)


def check(value: Any, file: str) -> int:
    """Fails if a value nests too deep or in a cycle, or is huge when it is copied.

    Args:
      value: of a decoded pickle.
      file: for messages.

    Returns:
      The number of values in a copy.

    Raises:
      FormatError: if it has more than `MOST_NODES` or `MOST_NESTED`.
    """
    # By id: the nodes of a copy, and how deep it nests. None while it is open.
    sizes: dict[int, tuple[int, int] | None] = {}
    stack = [value]
    nested_open = num_parts = nodes = 0
    while stack:
        node = stack[-1]
        if sizes.get(id(node)) is not None:
            stack.pop()
            continue
        parts = _parts(node)
        if id(node) not in sizes:
            sizes[id(node)] = None
            nested_open, num_parts = nested_open + 1, num_parts + len(parts)
            if nested_open > MOST_NESTED or num_parts > MOST_NODES:
                break
            for part in parts:
                if not isinstance(part, _CONTAINERS):
                    continue
                if id(part) in sizes and sizes[id(part)] is None:
                    raise FormatError(f"{file} holds a value that contains itself")
                stack.append(part)
            continue
        stack.pop()
        nested_open -= 1
        measured = [sizes.get(id(part)) or (1, 0) for part in parts]
        nodes = 1 + sum(size for size, _ in measured)
        nested = 1 + max((depth for _, depth in measured), default=0)
        if nodes > MOST_NODES or nested > MOST_NESTED:
            break
        sizes[id(node)] = (nodes, nested)
    else:
        # The outermost value is the last.
        return nodes
    raise FormatError(
        f"{file} holds more than {MOST_NODES} values, or values nested deeper"
        f" than {MOST_NESTED}; it is no state dict, or made to exhaust memory"
    )


def _parts(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [*node.keys(), *node.values()]
    return list(node) if isinstance(node, _CONTAINERS) else []
