"""Components: state of a run other than weights and batches, and how it is shared."""

from etils import epy

from elastic_ckpt.core import renamed

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.checkpoint.components.component import Component
    from elastic_ckpt.checkpoint.components.loading import Summary, load, named
    from elastic_ckpt.checkpoint.components.rng import Rng
    from elastic_ckpt.checkpoint.components.validation import Finding, validate

renamed.in_module(
    globals(),
    Computed="Component(state, sharing=function)",
    Global='Component(state, "global")',
    PerGroup='Component(state, "per_group", axis=..., mesh=...)',
    PerNode='Component(state, "per_node")',
    PerRank='Component(state, "per_host")',
    Replicated='Component(state, "replicated")',
)

__all__ = [
    "Component",
    "Finding",
    "Rng",
    "Summary",
    "load",
    "named",
    "validate",
]
