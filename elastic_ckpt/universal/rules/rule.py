"""A rule: tensors of a checkpoint and tensors of a target with the same elements.

Each side maps name patterns to dims expressions. A dim, a capture and a rank axis are
all coordinates of the same elements: `layer` may be in the names of one side and a dim
of the other. Exchanging the sides inverts a rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ckpt.universal.rules.checkpoint_value import CheckpointValue, Required

# A number, arithmetic on other sizes, or a value of the checkpoint.
Size = float | str | CheckpointValue

# The powers of a parameter's scale, by the kind of state. A gradient is divided by the
# scale; the second moment is that of a squared gradient.
POWERS = {
    **{"parameter": 1, "master": 1, "first_moment": -1, "second_moment": -2},
    # Of Muon, and of SGD.
    "momentum_buffer": -1,
}
# The kinds of state that are shifted, and padded with the values of the rule.
SHIFTED = ("parameter", "master")
# In the other direction, a copy is compared with its original, or not read.
COPIES = ("checked", "unchecked")
# The only direction that a rule holds in: from the checkpoint, or to it.
DIRECTIONS = ("forward", "inverse")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorPattern:
    """The tensors whose names match a pattern, and their dims.

    Values are those of the other side, scaled, then shifted.

    Attributes:
      name: a name pattern, see `name_pattern`.
      dims: a dims expression, see `dims`.
      replicated: captures and rank axes over which values have to be bit-equal, and
        dims whose first index is read.
      unchecked: captures, rank axes and dims of which the first is taken.
      mean: captures, rank axes and dims over which values are averaged.
      sum: captures, rank axes and dims over which values are added.
      copy: for a further tensor with the elements of another one of its side: what
        becomes of it in the other direction, one of `COPIES`; "" for others.
      times: tensors by whose values these are multiplied where they are read. Dims
        that one lacks are those along which it is the same.
      plus: two matrices whose product is added where they are read. They have one name
        in common that the sum lacks.
      viewed_as: the dtype that the stored bytes are read as; None for that of the file.
      scale: number, or arithmetic on named sizes.
      shift: number, or arithmetic on named sizes.
      dtype: that a target tensor has; None for that of its source.
    """

    name: str
    dims: str
    replicated: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()
    sum: tuple[str, ...] = ()
    copy: str = ""
    times: tuple[TensorPattern, ...] = ()
    plus: tuple[TensorPattern, ...] = ()
    viewed_as: str | None = None
    scale: float | str = 1.0
    shift: float | str = 0.0
    dtype: str | None = None

    @property
    def reduced(self) -> tuple[str, ...]:
        """The captures, rank axes and dims that the other side lacks."""
        return (*self.replicated, *self.unchecked, *self.mean, *self.sum)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The relation of tensors of a checkpoint with tensors of a target.

    Attributes:
      source: the tensors of the checkpoint.
      target: the tensors that are made of them.
      pad: the values of padding, by the name of a dim that one side alone has.
      sizes: by name; beside those of the layout.
      widths: the sizes on each rank, by dim and rank axis.
      states: the states that it holds for; None for all of the layout.
      kind: if not None, it holds for tensors of this kind, and names are whole names,
        which no state completes.
      optional: whether the checkpoint may lack all of its tensors.
      only: the one of `DIRECTIONS` in which it holds; "" for both.
      excepted: names that its sources do not match; `*` stands for any text.
      require: the values of the checkpoint without which it is not used, by path.
      unmet: the one that a checkpoint has not, for people; "" if it has all.
      place: for messages.
    """

    source: tuple[TensorPattern, ...]
    target: tuple[TensorPattern, ...]
    pad: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Size] = dataclasses.field(default_factory=dict)
    widths: Mapping[str, Mapping[str, tuple[int, ...]]] = dataclasses.field(
        default_factory=dict
    )
    states: tuple[str, ...] | None = None
    kind: str | None = None
    optional: bool = False
    only: str = ""
    excepted: tuple[str, ...] = ()
    require: Required = dataclasses.field(default_factory=dict)
    unmet: str = ""
    place: str = dataclasses.field(default="", compare=False)

    def inverse(self) -> Rule:
        """The same relation in the other direction."""
        only = self.only and DIRECTIONS[self.only == DIRECTIONS[0]]
        return dataclasses.replace(
            self, source=self.target, target=self.source, only=only
        )

    @property
    def text(self) -> str:
        """Its place, or the name of its first tensor."""
        first = next((each.name for each in (*self.source, *self.target)), "")
        return self.place or f"the rule of {first!r}"


def side(tensors: Mapping[str, str | TensorPattern]) -> tuple[TensorPattern, ...]:
    """A side of a rule, written as in a file: `{"lm_head.weight": "vocab embed"}`.

    Args:
      tensors: dims expressions, or patterns, whose names are then replaced, by name.
    """
    return tuple(
        TensorPattern(name=name, dims=value)
        if isinstance(value, str)
        else dataclasses.replace(value, name=name)
        for name, value in tensors.items()
    )
