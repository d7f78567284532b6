"""A size that neither checkpoint nor target has, so that a user has to choose it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ckpt.universal.rules.layout_error import LayoutError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A size that is one of a few numbers.

    Attributes:
      meanings: of each number, for people.
      place: for messages.
    """

    meanings: Mapping[int, str]
    place: str = dataclasses.field(default="the layout", compare=False)

    def check(self, name: str, number: object) -> None:
        """Checks that a number is one of those to choose from.

        Raises:
          LayoutError: if it is not.
        """
        if number not in self.meanings:
            raise LayoutError(
                f"{self.place}: {name} cannot be {number}: {self._listed}"
            )

    def missing(self, name: str) -> LayoutError:
        """The error about a size that was not chosen."""
        first = next(iter(self.meanings))
        return LayoutError(
            f"{self.place}: choose {name!r}, which shapes do not tell: {self._listed}."
            f" Give it by `--size {name}={first}` of elastic-ckpt"
            f" convert, `shipped_layouts.load(..., sizes={{{name!r}: {first}}})`, or in"
            " `sizes` of a copy of the file"
        )

    @property
    def _listed(self) -> str:
        return "; ".join(f"{number} {text}" for number, text in self.meanings.items())
