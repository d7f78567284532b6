"""Errors about steps that are errors of Orbax too."""

from __future__ import annotations

from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors


class StepAlreadyExistsError(
    errors.CheckpointError, ocp.training.errors.StepAlreadyExistsError
):
    """The step exists, and the save does not overwrite it."""


class StepNotFoundError(errors.CheckpointError, ocp.training.errors.StepNotFoundError):
    """The step is in no tier."""
