"""Checkpoints of other programs: their layouts, and values for trees of ours."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.universal.loading import load

__all__ = ["load"]
