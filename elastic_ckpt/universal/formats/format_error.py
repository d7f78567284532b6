"""The error of files of other programs that cannot be read."""

from __future__ import annotations

from elastic_ckpt.core import errors


class FormatError(errors.CheckpointError):
    """A file of another program is damaged, unsafe, or in an unknown format."""
