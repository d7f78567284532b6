"""Comparisons of the copies of the state, from the events of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core.errors import MOST_NAMED
from elastic_ckpt.inspect.report_page import Section

_FINDING = "replicas_differ"
_VALIDATION = "validated"
_PRESERVED = "step_preserved"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Copies of a part of the state that differ.

    Attributes:
      step: after which they were compared.
      leaf: the path of the leaf; empty if the trees of the hosts differ.
      hosts: that hold the copies that differ from most.
      is_certain: whether most copies are equal; otherwise `hosts` hold all copies.
      why: the finding as a sentence.
    """

    step: int
    leaf: str
    hosts: tuple[int, ...]
    is_certain: bool
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaFindings:
    """The comparisons of the copies of a run's state.

    Attributes:
      step: of the newest comparison.
      level: how it compared them.
      newest: the findings at the newest step that has any.
      preserved_step: from before copies differed, in storage; None if none is known.
    """

    step: int
    level: str
    newest: tuple[Finding, ...]
    preserved_step: int | None


def of_events(events: Sequence[Mapping[str, Any]]) -> ReplicaFindings | None:
    """The comparisons among a run's events; None if there was none."""
    validated = [each for each in events if each["event"] == _VALIDATION]
    if not validated:
        return None
    findings = _findings(events)
    kept = [each["step"] for each in events if each["event"] == _PRESERVED]
    return ReplicaFindings(
        step=validated[-1]["step"],
        level=validated[-1]["level"],
        newest=tuple(each for each in findings if each.step == findings[-1].step),
        preserved_step=kept[-1] if kept else None,
    )


def line(findings: ReplicaFindings) -> str:
    """The comparisons as one line, such as `equal at step 40 (tensor)`."""
    equal = f"equal at step {findings.step:,} ({findings.level})"
    if not findings.newest:
        return equal
    named = [
        f"{each.leaf or 'the tree'} at hosts {', '.join(map(str, each.hosts))}"
        + ("" if each.is_certain else " (which of them is unknown)")
        for each in findings.newest[:MOST_NAMED]
    ]
    more = len(findings.newest) - len(named)
    differ = "; ".join([*named, *([f"and {more:,} more"] if more else [])])
    if findings.preserved_step is not None:
        differ += f" (step {findings.preserved_step:,}, from before, is preserved)"
    step = findings.newest[0].step
    if step == findings.step:
        return f"DIFFER at step {step:,}: {differ}"
    return f"{equal}, but DIFFERED at step {step:,}: {differ}"


def section(events: Sequence[Mapping[str, Any]], *, most_rows: int) -> Section | None:
    """The comparisons as a section of a report; None if there was none.

    Args:
      events: of the run.
      most_rows: of its table; it has the newest findings.
    """
    compared = of_events(events)
    if compared is None:
        return None
    findings = _findings(events)
    steps = {each["step"] for each in events if each["event"] == _VALIDATION}
    differing = {each.step for each in findings}
    text = (
        f"The copies of the state were compared after {len(steps):,} steps, last after"
        f" step {compared.step:,} ({compared.level}). "
    )
    if findings:
        text += f"{len(findings):,} parts differed, in {len(differing):,} steps."
    else:
        text += "All were equal."
    return Section(
        title="Replicas",
        verdict="DIFFER" if findings else "EQUAL",
        mood="bad" if findings else "good",
        text=text,
        columns=("step", "leaf", "hosts", "finding"),
        is_table=True,
        rows=[
            (f"{each.step:,}", each.leaf, ", ".join(map(str, each.hosts)), each.why)
            for each in findings[-most_rows:]
        ],
    )


def _findings(events: Sequence[Mapping[str, Any]]) -> list[Finding]:
    return [
        Finding(
            step=each["step"],
            leaf=each["leaf"],
            hosts=tuple(each["hosts"]),
            is_certain=each["is_certain"],
            why=each["why"],
        )
        for each in events
        if each["event"] == _FINDING
    ]
