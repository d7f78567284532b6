"""Errors about steps that are errors of Orbax too."""

from __future__ import annotations

from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors


class StepAlreadyExistsError(
    errors.CheckpointError, ocp.training.errors.StepAlreadyExistsError
):
    """A step is to be saved that is there, and not to be overwritten."""


class StepNotFoundError(errors.CheckpointError, ocp.training.errors.StepNotFoundError):
    """A step is asked for that is in no tier."""
