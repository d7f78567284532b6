"""Kinds of tensors that follow a parameter: moments, master weights."""

from __future__ import annotations

import dataclasses

# Stands for the name of the parameter in the name of a state.
PARAMETER = "{}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The names of one kind of state; `{}` stands for the name of the parameter.

    Attributes:
      source: in the checkpoint, `exp_avg/{}`; None if it has none.
      target: in the target, `opt_state/0/mu/{}`; None if it has none: tensors of the
        checkpoint are dropped.
    """

    source: str | None
    target: str | None

    def inverse(self) -> State:
        """The state in the other direction."""
        return State(source=self.target, target=self.source)


# The states of a layout that lists none.
ONLY_PARAMETERS = {"parameter": State(source=PARAMETER, target=PARAMETER)}
