"""Components: state of a run other than weights and batches, and how it is shared."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.components.array_patterns import pattern_of
    from elastic_ckpt.components.component import Component
    from elastic_ckpt.components.loading import Summary, load, named
    from elastic_ckpt.components.patterns import (
        Computed,
        Global,
        PerGroup,
        PerNode,
        PerRank,
        Replicated,
    )
    from elastic_ckpt.components.rng import Rng
    from elastic_ckpt.components.validation import Finding, validate

__all__ = [
    "Component",
    "Computed",
    "Finding",
    "Global",
    "PerGroup",
    "PerNode",
    "PerRank",
    "Replicated",
    "Rng",
    "Summary",
    "load",
    "named",
    "pattern_of",
    "validate",
]
