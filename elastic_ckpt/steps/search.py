"""Search: the newest step of which every box and component is reachable somewhere.

A step counts in any mixture of tiers and holders, on the present hosts, independent of
the hosts that saved it. Manifests of different saves of a step are kept apart, because
a run that repeated a step may have computed other bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from elastic_ckpt.core import box_cover, boxes, errors
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.steps.step_id import StepId


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One save of a step, and the parts of it that no holder has.

    Attributes:
      step: the training step.
      save: which save of it.
      holdings: all parts of it that are held.
      gaps: by the number of a leaf, the disjoint boxes that no holder has.
      missing_parts: by the name of a component, its parts that no holder has.
      overlapping: the leaves of which saved boxes share elements.
    """

    step: int
    save: str
    holdings: Holdings
    gaps: Mapping[int, boxes.Boxes]
    missing_parts: Mapping[str, tuple[int, ...]]
    overlapping: frozenset[int]

    @property
    def step_id(self) -> StepId:
        """The step, and which save of it."""
        return StepId(self.step, self.save)

    @classmethod
    def from_offers(cls, offers: Sequence[Offer]) -> Step:
        """Makes the step of `offers`, at least one, all of one save.

        Raises:
          CheckpointError: if they are not of one save.
        """
        holdings = Holdings.from_offers(offers)
        gaps, overlapping = _gaps(holdings)
        return cls(
            step=offers[0].manifest.step,
            save=offers[0].manifest.save,
            holdings=holdings,
            gaps=gaps,
            missing_parts=_missing_parts(holdings),
            overlapping=overlapping,
        )

    @property
    def complete(self) -> bool:
        """Whether all of it can be read, and in one way only."""
        diverged = len(self.holdings.diverged) > 0
        return not (self.gaps or self.missing_parts or diverged)

    def problem(self) -> str:
        """Describes why a step is not complete, for people."""
        tiers = " and ".join(sorted({offer.tier for offer in self.holdings.offers}))
        return f"step {self.step} in {tiers} {self.lacking()}"

    def lacking(self) -> str:
        """The end of `problem`: the missing parts, or that holders disagree."""
        contents = self.holdings.contents
        lacks = []
        if self.gaps:
            named = (
                f"{contents.leaves[leaf].path}{lacking[number]}"
                for leaf, lacking in self.gaps.items()
                for number in range(len(lacking))
            )
            lacks.append(
                f"parts of {len(self.gaps)} of {len(contents.leaves)} leaves:"
                f" [{errors.first_of(named)}]"
            )
        for name, parts in self.missing_parts.items():
            lacks.append(
                f"{len(parts)} of {contents.components[name]} parts of {name}:"
                f" [{errors.first_of(map(str, parts))}]"
            )
        problems = [f"lacks {each}" for each in lacks]
        diverged = self.holdings.diverged.tolist()
        if diverged:
            problems.append(
                f"has different values at different holders of {len(diverged)} parts:"
                f" [{errors.first_of(map(self.holdings.name, diverged))}]"
            )
        return ", and ".join(problems)


def newest(offers: Sequence[Offer]) -> Step | None:
    """The newest step that is complete by the manifests of all tiers.

    Older steps are not examined.
    """
    return next((step for step in steps(offers) if step.complete), None)


def steps(offers: Sequence[Offer]) -> Iterator[Step]:
    """Examines the steps that are offered and their saves, newest first."""
    return map(Step.from_offers, saves(offers))


def saves(offers: Sequence[Offer]) -> list[list[Offer]]:
    """Groups `offers` by step and save, newest first.

    Manifests that list different contents are separate groups.
    """
    groups: dict[StepId, list[list[Offer]]] = {}
    for offer in offers:
        manifest = offer.manifest
        alike = groups.setdefault(manifest.step_id, [])
        for group in alike:
            contents = group[0].manifest.contents
            if manifest.contents is contents or manifest.contents == contents:
                group.append(offer)
                break
        else:
            alike.append([offer])
    ordered = sorted(groups, reverse=True)
    return [group for key in ordered for group in groups[key]]


def _gaps(
    holdings: Holdings,
) -> tuple[dict[int, boxes.Boxes], frozenset[int]]:
    gaps: dict[int, boxes.Boxes] = {}
    overlapping = set()
    contents = holdings.contents
    tiled = box_cover.tiled(contents.shapes, holdings.leaf, holdings.boxes)
    for number in np.flatnonzero(~tiled).tolist():
        leaf = contents.leaves[number]
        rank = len(leaf.shape)
        held = holdings.boxes.take(holdings.of_leaf(number))
        held = boxes.Boxes(start=held.start[:, :rank], stop=held.stop[:, :rank])
        array = boxes.whole(leaf.shape)
        lacking = box_cover.gaps(array, held)
        if len(lacking):
            gaps[number] = lacking
        covered = array.volume - int(lacking.volumes.sum())
        if int(held.volumes.sum()) > covered:
            overlapping.add(number)
    return gaps, frozenset(overlapping)


def _missing_parts(holdings: Holdings) -> dict[str, tuple[int, ...]]:
    components = holdings.contents.components
    there = {name: np.zeros(parts, bool) for name, parts in components.items()}
    for file in holdings.files:
        there[file.component][slice(*file.parts)] = True
    return {
        name: tuple(np.flatnonzero(~held).tolist())
        for name, held in there.items()
        if not held.all()
    }
