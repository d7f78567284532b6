"""What a checkpoint holds beside its tensors, such as `args/num_query_groups`.

Layouts refer to it by its path in `Checkpoint.values`: for a number, or to require that
it has one of some values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from elastic_ckpt.universal.rules.layout_error import LayoutError

# Below it, a float has each integer.
_LIMIT = 2**53
_MOST_DIGITS = 15

# Texts, numbers or flags that are allowed, by path; None is a value that is missing.
Required = Mapping[str, tuple[str | float | None, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointValue:
    """A number at one of several paths.

    Attributes:
      paths: of which the first counts that the checkpoint has.
      default: the number if it has none; None if there is no default.
      place: for messages.
    """

    paths: tuple[str, ...]
    default: float | None = None
    place: str = dataclasses.field(default="the layout", compare=False)

    def number(self, values: Mapping[str, Any]) -> float | None:
        """The number in the values of a checkpoint, or the default.

        Args:
          values: by path, see `stored.Checkpoint`. None is no value, a flag is 0 or 1.

        Raises:
          LayoutError: if the value is no number, or too large.
        """
        for path in self.paths:
            value = values.get(path)
            if value is None:
                # Lists of numbers are one value: `config/block_size/0` is the first.
                above, _, at = path.rpartition("/")
                held = values.get(above)
                if isinstance(held, list) and at.isdecimal() and int(at) < len(held):
                    value = held[int(at)]
            if isinstance(value, str) and value.isascii() and value.isdecimal():
                # The metadata of safetensors are texts.
                value = int(value) if len(value) <= _MOST_DIGITS else value
            if isinstance(value, int | float) and -_LIMIT < value < _LIMIT:
                return int(value) if value == int(value) else value
            if value is not None:
                raise LayoutError(
                    f"{self.place}: {path} in the checkpoint is {repr(value)[:100]}, "
                    f"and not a number between -2**53 and 2**53; give a number instead"
                )
        return self.default

    @property
    def missing(self) -> str:
        """The sentence about a checkpoint that has none of the paths."""
        return f"{self.place}: the checkpoint has no value {' or '.join(self.paths)}"


def unmet(required: Required, values: Mapping[str, Any]) -> str:
    """The first value that a checkpoint has to have, and has not; "" if it has all.

    Args:
      required: the values that are allowed, by path.
      values: of the checkpoint, see `CheckpointValue.number`.
    """
    for path, allowed in required.items():
        value = None if values.get(path) == [] else values.get(path)
        inside = next((each for each in values if each.startswith(f"{path}/")), None)
        if value in allowed and inside is None:
            continue
        shown = "missing" if value is None else repr(value)[:100]
        if inside is not None:
            shown = f"{repr(values[inside])[:100]} at {inside}"
        fitting = ("missing" if each is None else repr(each) for each in allowed)
        return (
            f"{path} in the checkpoint is {shown}, and has to be {' or '.join(fitting)}"
        )
    return ""
