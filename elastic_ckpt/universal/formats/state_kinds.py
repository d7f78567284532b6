"""The kinds of optimizer states, by the names that optimizers give them."""

from __future__ import annotations

KINDS = {"fp32": "master", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}


def kind_of(state: str) -> str:
    """See `StoredTensor.kind`; a state of another name is of a kind of that name."""
    return KINDS.get(state, state)
