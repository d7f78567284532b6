"""Searches for the newest step whose parts are all reachable.

The parts may come from any mix of tiers and holders, and the current hosts need not be
the hosts that saved the step. Manifests of different saves of a step are never mixed: a
run that repeated the step may have computed different bits. The search starts at the
newest step and examines no more steps than necessary. Abandoned steps are found only by
number.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from elastic_ckpt.core import checked_json, errors
from elastic_ckpt.steps.step import Line, StepId

# A broken peer may list hundreds of saves that it does not have.
_MOST_TRIED = 300
_NO_MANIFEST = "has no readable manifest"


class Examined(Protocol):
    """A save of a step that was examined."""

    @property
    def step_id(self) -> StepId:
        """The step and the save."""
        ...

    @property
    def parents(self) -> tuple[StepId, ...]:
        """See `Contents.parents`."""
        ...

    @property
    def problem(self) -> str | None:
        """A message that says why the save cannot be read; None if it is complete."""
        ...


ExaminedT = TypeVar("ExaminedT", bound=Examined)


class Looked(NamedTuple, Generic[ExaminedT]):
    """The result of looking for a step.

    Attributes:
      saves: the step's saves, newest first.
      problems: a message for each manifest that could not be read.
    """

    saves: Sequence[ExaminedT]
    problems: Sequence[str]


class Outcome(NamedTuple, Generic[ExaminedT]):
    """The result of a search: a complete step, and the problems of newer ones.

    Attributes:
      found: the newest complete step; None if no step is complete.
      passed_over: the problem of each newer step, by step, newest first.
    """

    found: ExaminedT | None
    passed_over: Mapping[int, str]


class Search(Generic[ExaminedT]):
    """A search for steps.

    Args:
      saves: the steps that may exist, with their saves where known, including the
        newest save.
      look: a function that examines a step, called once per step.
      lines: lines that manifests might lack: the caller's line, and lines recorded in
        storage.
      without: saves that turned out to be unreadable, and the reasons.

    Attributes:
      line: the line of the newest save.

    Raises:
      LaterVersionError: if a later version of elastic_ckpt saved the newest step in
        storage.
    """

    def __init__(
        self,
        saves: Collection[StepId],
        look: Callable[[int], Looked[ExaminedT]],
        *,
        lines: Collection[Line] = (),
        without: Mapping[StepId, str] = types.MappingProxyType({}),
    ) -> None:
        self._steps = sorted({each.step for each in saves})
        self._look = functools.cache(look)
        self._without = without
        newest = sorted({*saves}, key=lambda each: (each.save, each.step))
        found = (
            Line(save=each.step_id.save, parents=each.parents)
            for step_id in newest[: -_MOST_TRIED - 1 : -1]
            for each in self._look(step_id.step).saves
            if each.step_id == step_id
        )
        known = [*lines, next(found, Line(save="", parents=()))]
        self.line = max(known, key=lambda line: line.save)

    def newest(self) -> Outcome[ExaminedT]:
        """The newest complete step.

        Raises:
          LaterVersionError: if a later version of elastic_ckpt saved a newer step in
            storage. Resuming from an older step would abandon it.
        """
        passed_over: dict[int, str] = {}
        for step in reversed(self._steps):
            found, why = self._examined(step)
            if found is not None:
                return Outcome(found, passed_over)
            passed_over |= {step: why} if why else {}
        return Outcome(None, passed_over)

    def complete_steps(self) -> list[ExaminedT]:
        """The complete steps, in ascending order."""
        complete = []
        for step in self._steps:
            with contextlib.suppress(checked_json.LaterVersionError):
                complete.append(self._examined(step)[0])
        return [found for found in complete if found is not None]

    def lacks(self, step: int) -> bool:
        """Whether `step` does not exist; False if that is unknown."""
        return step not in self._steps and not self._look(step).problems

    def of_step(self, step: int, save: str = "") -> ExaminedT:
        """The newest complete save of `step`; abandoned only if there is no other.

        Args:
          step: the step number.
          save: the only save to consider; empty for all.

        Raises:
          CheckpointError: if there is no such save; the message names the missing parts
            and the step to restore instead.
        """
        tried = [self._examined(step, save, abandoned=each) for each in (False, True)]
        for found, _ in tried:
            if found is not None:
                return found
        named = f"step {step} {_NO_MANIFEST}" + (f" of save {save}" if save else "")
        why = next((why for _, why in tried if why), named)
        instead = self.newest().found
        if instead is None:
            raise errors.CheckpointError(f"{why}; no step is complete")
        number = instead.step_id.step
        raise errors.CheckpointError(
            f"{why}; the newest complete step is {number}; restore it with"
            f" step={number}"
        )

    def _examined(
        self, step: int, save: str = "", *, abandoned: bool = False
    ) -> tuple[ExaminedT | None, str]:
        # The complete save of a step, or the problem; neither if no save of the step
        # qualifies.
        looked = self._look(step)
        of_line = [
            each
            for each in looked.saves
            if self.line.abandons(each.step_id) == abandoned
            and save in ("", each.step_id.save)
        ]
        wrong = []
        for each in of_line:
            problem = self._without.get(each.step_id, each.problem)
            if problem is None:
                return each, ""
            wrong.append(problem)
        if not of_line and (looked.saves or abandoned):
            return None, ""
        why = "; ".join(wrong or [f"step {step} {_NO_MANIFEST}"])
        problems = f" ({'; '.join(looked.problems)})" if looked.problems else ""
        return None, why + problems
