"""What a step is, and the errors about steps that are errors of Orbax too."""

from __future__ import annotations

import operator
from typing import Any

from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors


class StepAlreadyExistsError(
    errors.CheckpointError, ocp.training.errors.StepAlreadyExistsError
):
    """The step exists, and the save does not overwrite it."""


class StepNotFoundError(errors.CheckpointError, ocp.training.errors.StepNotFoundError):
    """The step is in no tier."""


def step_number(step: Any) -> int:
    """The number of a step: an integer of any type, or what has one as its `step`.

    Raises:
      CheckpointError: if it is no integer at or above 0.
    """
    number = getattr(step, "step", step)
    try:
        index = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        index = -1
    if index < 0:
        raise errors.CheckpointError(
            f"{number!r} ({type(number).__name__}) is not a step; give an integer of"
            " at least 0"
        )
    return index
