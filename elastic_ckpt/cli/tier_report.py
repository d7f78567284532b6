"""A survey of tiers as text: its steps, and what the loss of a host or slice takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from elastic_ckpt.core.errors import MOST_NAMED, first_of

if TYPE_CHECKING:
    from elastic_ckpt.inspect import survey
    from elastic_ckpt.inspect.step_components import StepComponent


def describe(run: str, report: survey.Survey) -> str:
    """The survey of a run, as lines."""
    named = f"run {run}" if run else "no run"
    lines = [f"{named}: {numbered(report.known, 'in tiers')}"]
    save = ""
    for step in (each for each in report.steps if not each.abandoned):
        lines += _step_lines(step, goes_on=step.save != save, known=report.known)
        save = step.save
    abandoned = [each for each in report.steps if each.abandoned]
    if abandoned:
        lines.append(
            "abandoned, since the run went on from an earlier step; they are restored"
            " only by their numbers:"
        )
    for step in abandoned:
        lines += _step_lines(step, goes_on=False)
    for covered in report.coverage:
        # Without steps in memory there is nothing to lose with a host.
        if covered.num_domains:
            lines += _coverage_lines(covered)
    lines += [
        f"step {each.step} is being written, or was cut short: {each.path}"
        for each in report.leftovers
    ]
    lines += report.problems
    return "\n".join(lines)


def numbered(steps: Sequence[int], location: str) -> str:
    """How many steps there are, with the numbers of the first and the last."""
    count = f"{len(steps)} steps {location}"
    if not steps:
        return count
    some = list(map(str, steps))
    if len(some) > 2 * MOST_NAMED:
        some = [*some[:MOST_NAMED], "...", *some[-MOST_NAMED:]]
    return f"{count}: {', '.join(some)}"


def _step_lines(
    step: survey.SurveyedStep, *, goes_on: bool, known: Sequence[int] = ()
) -> Iterator[str]:
    state = "complete" if step.problem is None else f"incomplete: {step.problem}"
    if not step.save:
        state = "saved by Orbax alone, without manifests"
    if goes_on and step.parent is not None:
        before = step.parent[0]
        # A save in place of another goes on from it; once it had the line before it.
        is_again = before == step.step or (
            before == step.step - 1 and before not in known
        )
        state += ", saved again" if is_again else f", goes on from step {before}"
    yield f"step {step.step}: {state}" + ", preserved" * step.preserved
    for each in step.tiers if step.save else ():
        alone = "all of it" if each.problem is None else each.problem
        yield (
            f"  {each.tier:<10}  {each.num_bytes:>15,} bytes  at {len(each.holders)}"
            f" ({first_of(each.holders)})  {alone}"
        )
    yield from component_lines(step.components)


def component_lines(parts: Sequence[StepComponent]) -> Iterator[str]:
    """A line for each component of a step."""
    width = max((len(each.name) for each in parts), default=0)
    for each in parts:
        size = f"{each.num_leaves:,} leaves"
        if each.num_files:
            size = f"{each.num_files:,} files"
        version = "" if each.version is None else f" version {each.version},"
        declared = {None: "", True: " required,", False: " optional,"}[each.required]
        yield (
            f"  {each.name:<{width}}  {each.pattern},{declared}{version} {size},"
            f" {each.num_bytes:,} bytes at {len(each.hosts)}"
            f" ({first_of(each.hosts)}), digest {each.digest[:12]}; resize:"
            f" {each.resize}"
        )


def _coverage_lines(covered: survey.CoveredStep) -> Iterator[str]:
    yield (
        f"step {covered.step}, any one {covered.domain} of {covered.num_domains} lost:"
        f" {covered.num_survivors:,} of {covered.num_items:,} parts survive"
    )
    for loss in covered.losses[:MOST_NAMED]:
        more = ", ..." if loss.num_items > len(loss.first) else ""
        yield (
            f"  with {covered.domain} {loss.name!r} goes {loss.num_items:,}:"
            f" {', '.join(loss.first)}{more}"
        )
    if covered.losses[MOST_NAMED:]:
        yield f"  and with {len(covered.losses) - MOST_NAMED:,} more; --json lists all"
