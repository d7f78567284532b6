"""Search: the newest step of which all parts are reachable somewhere.

A step counts in any mixture of tiers and holders, on the present hosts, independent of
the hosts that saved it. Manifests of different saves of a step are kept apart, because
a run that repeated a step may have computed other bits. Only as many steps are looked
at as are needed, the newest first. Abandoned steps are found only by their
numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from elastic_ckpt.core import checked_json, errors
from elastic_ckpt.steps.step import Line, StepId

_UNKNOWN = Line(save="", parents=())
# A broken peer may list hundreds of saves that it does not have.
_MOST_TRIED = 300
_NO_MANIFEST = "has no manifest that can be read"


class Examined(Protocol):
    """A save of a step that somebody has looked at."""

    @property
    def step_id(self) -> StepId:
        """The step, and which save of it."""
        ...

    @property
    def parents(self) -> tuple[StepId, ...]:
        """See `Contents.parents`."""
        ...

    @property
    def problem(self) -> str | None:
        """Why it cannot be read, a sentence; None if it is complete."""
        ...


ExaminedT = TypeVar("ExaminedT", bound=Examined)


class Looked(NamedTuple, Generic[ExaminedT]):
    """What was found of a step.

    Attributes:
      saves: of the step, the newest first.
      problems: manifests that could not be had or read, and why, a sentence each.
    """

    saves: Sequence[ExaminedT]
    problems: Sequence[str]


class Outcome(NamedTuple, Generic[ExaminedT]):
    """The result of a search: a complete step, and the problems of newer ones.

    Attributes:
      found: None if no step is complete.
      passed_over: by step, newest first, what is wrong with those that are newer.
    """

    found: ExaminedT | None
    passed_over: Mapping[int, str]


class Search(Generic[ExaminedT]):
    """A search for steps.

    Args:
      steps: that may be there.
      saves: some of them with their saves, the newest save among them.
      look: looks at a step; it is asked once for each.
      lines: that no manifest contains: the caller's, and those recorded in storage.
      without: steps and saves that proved to be unreadable.

    Attributes:
      line: of the newest save.
    """

    def __init__(
        self,
        steps: Iterable[int],
        saves: Iterable[StepId],
        look: Callable[[int], Looked[ExaminedT]],
        *,
        lines: Collection[Line] = (),
        without: Collection[StepId] = (),
    ) -> None:
        self._steps = sorted(set(steps))
        self._look = functools.cache(look)
        self._without = frozenset(without)
        self.line = max([*lines, self._line(saves)], key=lambda line: line.save)

    def newest(self, *, before: int | None = None) -> Outcome[ExaminedT]:
        """The newest complete step.

        Args:
          before: looks only at steps with a lower number.

        Raises:
          LaterVersionError: if a later version of elastic_ckpt has saved one that is
            newer in storage: an older step would abandon it.
        """
        passed_over: dict[int, str] = {}
        for step in reversed(self._steps):
            if before is None or step < before:
                found = self._examined(step, passed_over, abandoned=False)
                if found is not None:
                    return Outcome(found, passed_over)
        return Outcome(None, passed_over)

    def complete_steps(self) -> list[ExaminedT]:
        """The steps that are complete, ascending."""
        found = []
        for step in self._steps:
            with contextlib.suppress(checked_json.LaterVersionError):
                found.append(self._examined(step, {}, abandoned=False))
        return [each for each in found if each is not None]

    def lacks(self, step: int) -> bool:
        """Whether all could be read, and nothing is there of `step`."""
        return step not in self._steps and not self._look(step).problems

    def of_step(self, step: int, save: str = "") -> ExaminedT:
        """The complete save of `step`, the last of several.

        An abandoned one is taken if there is no other.

        Args:
          step: the step.
          save: the only one that counts; empty for all.

        Raises:
          CheckpointError: if there is none; the message names the missing parts and the
            step to restore instead.
        """
        why: dict[int, str] = {}
        for abandoned in (False, True):
            found = self._examined(step, why, abandoned=abandoned, save=save)
            if found is not None:
                return found
        instead = self.newest().found
        way_out = "no step is complete"
        if instead is not None:
            number = instead.step_id.step
            way_out = f"newest complete step is {number}; restore it with step={number}"
        named = f"step {step} {_NO_MANIFEST}" + (f" of save {save}" if save else "")
        raise errors.CheckpointError(f"{why.get(step, named)}; {way_out}")

    def _line(self, saves: Iterable[StepId]) -> Line:
        newest = sorted(set(saves), key=lambda each: (each.save, each.step))
        for step_id in newest[: -_MOST_TRIED - 1 : -1]:
            for each in self._look(step_id.step).saves:
                if each.step_id == step_id:
                    return Line(save=step_id.save, parents=each.parents)
        return _UNKNOWN

    def _examined(
        self, step: int, passed_over: dict[int, str], *, abandoned: bool, save: str = ""
    ) -> ExaminedT | None:
        # The complete save of a step; if there is none, notes what is wrong with it.
        looked = self._look(step)
        of_line = [
            each
            for each in looked.saves
            if self.line.abandons(each.step_id) == abandoned
            and save in ("", each.step_id.save)
        ]
        wrong = []
        for each in of_line:
            if each.step_id in self._without:
                continue
            if each.problem is None:
                return each
            wrong.append(each.problem)
        if of_line or not (looked.saves or abandoned):
            why = "proved to be unreadable" if of_line else _NO_MANIFEST
            problems = f" ({'; '.join(looked.problems)})" if looked.problems else ""
            described = "; ".join(wrong or [f"step {step} {why}"])
            passed_over.setdefault(step, f"{described}{problems}")
        return None
