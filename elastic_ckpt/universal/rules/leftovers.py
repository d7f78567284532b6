"""The one error that lists everything that a layout leaves over, on either side."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence

from elastic_ckpt.core import errors
from elastic_ckpt.universal.rules.layout_error import LayoutError


@dataclasses.dataclass(slots=True, kw_only=True)
class Leftovers:
    """Tensors and patterns without a partner, collected for one message.

    Attributes:
      place: of the layout.
      patterns: all name patterns of each side, with the places of their rules.
      sources: tensors of the checkpoint that no rule uses.
      targets: tensors of the target that no rule fills.
      ambiguous: tensors with the places of several rules that match them.
      unmatched: patterns that match nothing, with the places of their rules.
      incomplete: tensors that a rule requires beside others, with its place.
      unscaled: quantized tensors that are used, with their scales, which are dropped.
    """

    place: str
    patterns: tuple[Mapping[str, str], Mapping[str, str]]
    sources: list[str] = dataclasses.field(default_factory=list)
    targets: list[str] = dataclasses.field(default_factory=list)
    ambiguous: dict[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    unmatched: list[str] = dataclasses.field(default_factory=list)
    incomplete: list[str] = dataclasses.field(default_factory=list)
    unscaled: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> None:
        """Raises an error if anything is left over.

        Raises:
          LayoutError: lists it.
        """
        lines = []
        for names, patterns, text in (
            (
                self.sources,
                self.patterns[0],
                "tensors of the checkpoint are in no rule",
            ),
            (self.targets, self.patterns[1], "tensors of the target are in no rule"),
        ):
            if names:
                # A name may be that of tensors of several ranks.
                distinct = list(dict.fromkeys(names))
                shown = (_with_nearest(name, patterns) for name in distinct)
                lines.append(f"{len(distinct)} {text}: {errors.first_of(shown)}")
        if self.ambiguous:
            shown = [
                f"{name} ({' and '.join(rules)})"
                for name, rules in self.ambiguous.items()
            ]
            lines.append(
                f"{len(shown)} tensors are in several rules: {errors.first_of(shown)}"
            )
        if self.unmatched:
            lines.append(
                f"{len(self.unmatched)} patterns match no tensor: "
                f"{errors.first_of(self.unmatched)}"
            )
        if self.incomplete:
            lines.append(
                f"{len(self.incomplete)} tensors are missing beside others of their "
                f"rules: {errors.first_of(self.incomplete)}"
            )
        if self.unscaled:
            # A tensor may be one of several ranks.
            distinct = list(dict.fromkeys(self.unscaled))
            lines.append(
                f"{len(distinct)} quantized tensors would be loaded without their "
                "scales, which `drop` leaves out; dequantize the checkpoint before, or "
                f"add rules for the scales: {errors.first_of(distinct)}"
            )
        if lines:
            listed = "".join(f"\n  {line}" for line in lines)
            raise LayoutError(
                f"{self.place} does not fit the checkpoint and the target; add or "
                f"change rules, or list tensors of the checkpoint in `drop`:{listed}"
            )


def _with_nearest(name: str, patterns: Mapping[str, str]) -> str:
    near = difflib.get_close_matches(name, patterns, n=1, cutoff=0.0)
    if not near:
        return name
    return f"{name} (nearest: {near[0]!r}, {patterns[near[0]]})"
