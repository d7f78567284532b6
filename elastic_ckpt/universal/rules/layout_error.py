"""The error of a layout that is malformed, or that does not fit a checkpoint."""

from __future__ import annotations

from elastic_ckpt.core import errors


class LayoutError(errors.ConfigError):
    """A layout is malformed, or does not fit its checkpoint or its tree."""
