"""Loads other frameworks' checkpoints into trees of JAX arrays."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.universal.formats.files import FormatError
    from elastic_ckpt.universal.loading import load
    from elastic_ckpt.universal.opening import open_checkpoint
    from elastic_ckpt.universal.rules.layout import Layout, LayoutError

__all__ = [
    "FormatError",
    "Layout",
    "LayoutError",
    "load",
    "open_checkpoint",
]
