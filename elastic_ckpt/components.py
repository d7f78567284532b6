"""Components: state other than weights and batches, and how hosts share it."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.checkpoint.components.component import Component
    from elastic_ckpt.checkpoint.components.loading import Summary, load, named
    from elastic_ckpt.checkpoint.components.rng import Rng
    from elastic_ckpt.checkpoint.components.validation import Finding, validate

__all__ = [
    "Component",
    "Finding",
    "Rng",
    "Summary",
    "load",
    "named",
    "validate",
]
