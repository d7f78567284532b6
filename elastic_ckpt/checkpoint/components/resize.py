"""Rules for the states of a component when there are other hosts than before.

Each component declares a rule:

* `"error"`: it is not loaded; the error lists the choices
* `"reset"`: every host keeps the state that the component was made with
* `"from_first"`: every host gets the first of the old states
* a function `(old_states, new_count) -> new states`, both lists in order: by host, by
  node, or by the groups' coordinates in the mesh (the last axis varies fastest). All
  hosts call it, with the same arguments.

Whether states are the same ones as before is decided by their names. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic_ckpt.core import errors
from elastic_ckpt.core.errors import first_of

ERROR = "error"
RESET = "reset"
FROM_FIRST = "from_first"
Function = Callable[[list[Any], int], Sequence[Any]]
Rule = str | Function
_CHOICES = (
    "choose on_resize='reset' (as it was made), 'from_first' (the first old state for"
    " all), or a function (old_states, new_count) -> new states"
)


def check(rule: Rule) -> None:
    """Raises a ConfigError unless it is a rule."""
    if not callable(rule) and rule not in (ERROR, RESET, FROM_FIRST):
        raise errors.ConfigError(
            f"on_resize={rule!r} is no rule; leave it out ('error'), or {_CHOICES}"
        )


def name_of(rule: Rule) -> str:
    """The name of a rule, for people: a function's with its module."""
    if isinstance(rule, str):
        return rule
    # An object that is called, such as a partial function, has the name of its class.
    named = rule if hasattr(rule, "__qualname__") else type(rule)
    return f"{named.__module__}.{named.__qualname__}"


def place_of_same(old: Sequence[str], new: Sequence[str], own: int) -> int | None:
    """The place among the old states of this host's, if none has changed.

    Args:
      old: the names of the states that were saved.
      new: the names of the states that there are now.
      own: the place of this host's in `new`.

    Returns:
      None if there are others: then the rule applies.
    """
    if sorted(old) == sorted(new):
        return old.index(new[own])
    # A single state is that of all hosts under any pattern.
    return 0 if len(old) == len(new) == 1 else None


def needed(rule: Rule, num_old: int) -> range:
    """The places of the old states that a rule needs."""
    if callable(rule):
        return range(num_old)
    return range(1 if rule == FROM_FIRST else 0)


def new_state(
    rule: Rule, old: list[Any], *, initial: Any, new_count: int, own: int
) -> Any:
    """The state of this host under a rule other than `error`.

    Args:
      rule: the rule.
      old: the states at the places that `needed` lists.
      initial: that the component was made with.
      new_count: how many states there are now.
      own: the place of this host's.

    Raises:
      CheckpointError: if a function returns another number of states.
    """
    if not callable(rule):
        return old[0] if rule == FROM_FIRST else initial
    states = rule(old, new_count)
    if len(states) != new_count:
        raise errors.CheckpointError(
            f"the function of on_resize returned {len(states)} states for {new_count}"
            " places; return a list with one state for each"
        )
    return states[own]


def refused(
    component: str, pattern: str, old: Sequence[str], new: Sequence[str]
) -> errors.CheckpointError:
    """The error of a component without a rule."""
    return errors.CheckpointError(
        f"component {component!r} was saved {pattern} with {len(old)} states"
        f" ({first_of(old)}), and there are {len(new)} now ({first_of(new)});"
        f" {_CHOICES}"
    )
