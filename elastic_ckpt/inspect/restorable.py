"""The step that a run would be restored to now, and after the loss of a host or slice.

Decided from the manifests alone, as in a restore: a step counts if the holders that are
left have all of it together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from elastic_ckpt.inspect.tier_locations import Locations
from elastic_ckpt.steps import search
from elastic_ckpt.steps.holdings import Offer


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewestStep:
    """The newest step that a tier has all of.

    Attributes:
      tier: `local` (the memory of all hosts) or `persistent`.
      step: its number; None if there is none.
      time_ms: when it was committed, since the epoch; None if that is not known.
    """

    tier: str
    step: int | None
    time_ms: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AfterLoss:
    """The step that would be restored if one failure domain were lost with its memory.

    Attributes:
      domain: its kind, `host` or `slice`.
      name: of the domain; of a host its number, one of those that share its memory.
      step: None if the run would begin anew.
    """

    domain: str
    name: str
    step: int | None


def reachable(locations: Locations) -> list[Offer]:
    """The copies of the steps from which a restore chooses.

    These are the newest steps, down to one that persistent storage has all of, since no
    loss of hosts takes that away. Abandoned steps are left out.
    """
    offers: list[Offer] = []
    for step in reversed(locations.steps):
        copies, _ = locations.look(step)
        of_step = [
            each
            for each in copies
            if not locations.line.abandons(each.manifest.step_id)
        ]
        offers += of_step
        if search.newest(_in_tier(of_step, "persistent")) is not None:
            break
    return offers


def newest(offers: Sequence[Offer]) -> tuple[NewestStep, ...]:
    """The newest complete step of each tier."""
    return tuple(
        _newest(tier, _in_tier(offers, tier)) for tier in ("local", "persistent")
    )


def after_losses(
    offers: Sequence[Offer], *, slices: Iterable[int] = ()
) -> tuple[AfterLoss, ...]:
    """The step that is left after the loss of each slice and each host.

    Args:
      offers: the copies.
      slices: of the current world; they need not hold a copy.
    """
    losses = []
    for domain in ("slice", "host"):
        names = {_key(each, domain): _name(each, domain) for each in offers}
        if domain == "slice":
            names |= {str(number): str(number) for number in slices}
        names.pop("", None)
        for key in sorted(names, key=lambda key: (len(names[key]), names[key])):
            left = [
                each
                for each in offers
                if each.tier != "local" or _key(each, domain) != key
            ]
            losses.append(
                AfterLoss(domain=domain, name=names[key], step=_newest("", left).step)
            )
    return tuple(losses)


def _newest(tier: str, offers: Sequence[Offer]) -> NewestStep:
    step = search.newest(offers)
    if step is None:
        return NewestStep(tier=tier, step=None, time_ms=None)
    time_ms = step.holdings.contents.time_ms or None
    return NewestStep(tier=tier, step=step.step, time_ms=time_ms)


def _in_tier(offers: Sequence[Offer], tier: str) -> list[Offer]:
    return [each for each in offers if each.tier == tier]


def _key(offer: Offer, domain: str) -> str:
    # A host without a machine's name is alone on it.
    return offer.host.domains.get(domain, offer.host.id if domain == "host" else "")


def _name(offer: Offer, domain: str) -> str:
    return str(offer.host.number) if domain == "host" else _key(offer, domain)
