"""Checkpoints of other programs: their layouts, and values for trees of ours."""

from etils import epy

from elastic_ckpt.core import renamed

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.universal.formats.format_error import FormatError
    from elastic_ckpt.universal.loading import load
    from elastic_ckpt.universal.opening import open_checkpoint
    from elastic_ckpt.universal.rules.layout import Layout
    from elastic_ckpt.universal.rules.layout_error import LayoutError

_IN_LAYOUTS = "a part of ec.universal.Layout.from_dict({...})"
renamed.in_module(
    globals(),
    Index=_IN_LAYOUTS,
    Rule=_IN_LAYOUTS,
    State=_IN_LAYOUTS,
    TensorPattern=_IN_LAYOUTS,
    side=_IN_LAYOUTS,
)

__all__ = [
    "FormatError",
    "Layout",
    "LayoutError",
    "load",
    "open_checkpoint",
]
