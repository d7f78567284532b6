"""The keys of validation: which copies of the state are compared, and when."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.core.sections import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """Comparison of the copies of the state that should be equal."""

    replica_validation: str = key(
        "none",
        "Compare the copies of the state on devices and hosts, to find memory that"
        " changed without an error: `quick` compares a sample of each array, `tensor`"
        " a digest of it, `full` every element.",
        choices=("none", "quick", "tensor", "full"),
    )
    replica_validation_at_saves: bool = key(True, "Compare before each save.")
    replica_validation_interval: int = key(
        0,
        "Steps between two further comparisons, in addition to those before saves; 0"
        " makes none.",
        at_least=0,
    )
    replica_validation_tolerance: float = key(
        0.0,
        "With `full`, the largest difference between two elements, absolute and"
        " relative, that counts as equal.",
        at_least=0,
    )
    replica_validation_action: str = key(
        "warn",
        "What to do if copies differ: `warn` reports it, preserves the newest earlier"
        " step in storage and continues; `stop` ends the run before the step is saved.",
        choices=("warn", "stop"),
    )
