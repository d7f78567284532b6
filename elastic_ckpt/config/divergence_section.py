"""The keys of callbacks, and of those that detect a divergence."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.core.sections import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceSection:
    """Callbacks of the training loop, and detectors of a loss that diverges."""

    training_callbacks: str = key(
        "",
        "Your own callbacks: `module:function`, a function that takes the"
        " configuration and returns callbacks by name"
        " (elastic_ckpt.training.callbacks). Every host calls it. Empty uses none.",
    )
    distrust_steps: int = key(
        20,
        "If the loss is not finite, or a detector or callback finds a divergence,"
        " within this many steps of a restore from RAM, return to the newest earlier"
        " checkpoint in storage, once, and train on the same rows again: the copy in"
        " RAM may have been corrupt when it was saved. 0 disables this.",
        at_least=0,
    )
    divergence_action: str = key(
        "off",
        "What the detectors below do: `warn` reports; `stop` ends the run with the"
        " newest checkpoint from before the divergence; `abort` ends it without a"
        " save; `rollback` returns to that checkpoint, or else the beginning, and"
        " skips the data read since.",
        choices=("off", "warn", "stop", "abort", "rollback"),
    )
    divergence_non_finite: bool = key(
        True, "Act at once if the loss or the gradient norm is infinite or NaN."
    )
    divergence_patience_steps: int = key(
        10,
        "Consecutive bad steps after which a detector acts; a loss that is not finite"
        " needs only one.",
        at_least=1,
    )
    divergence_warmup_steps: int = key(
        100,
        "Steps at the beginning of a run in which only values that are not finite"
        " count.",
        at_least=0,
    )
    divergence_loss_smoothing: float = key(
        0.9,
        "Weight of the past in the smoothed loss, which is compared with its best"
        " value so far and with a slower average.",
        at_least=0,
        below=1,
    )
    divergence_loss_margin: float = key(
        0.0,
        "A step is bad if the smoothed loss is this many nats above its best value; 0"
        " disables this detector.",
        at_least=0,
    )
    divergence_loss_factor: float = key(
        0.0,
        "A step is bad if the smoothed loss is this many times its best value, such"
        " as 1.5; 0 disables this detector.",
        at_least=0,
    )
    divergence_slow_smoothing: float = key(
        0.99,
        "Weight of the past in the slower average of the loss; choose it above"
        " divergence_loss_smoothing.",
        at_least=0,
        below=1,
    )
    divergence_slow_margin: float = key(
        0.0,
        "A step is bad if the smoothed loss is this many nats above the slower"
        " average; 0 disables this detector.",
        at_least=0,
    )
    divergence_window_steps: int = key(
        50,
        "Steps in each of the two windows whose mean losses are compared.",
        at_least=1,
    )
    divergence_window_margin: float = key(
        0.0,
        "A step is bad if the mean loss of the last window is this many nats above"
        " that of the window before; 0 disables this detector.",
        at_least=0,
    )
    divergence_gradient_norm_factor: float = key(
        0.0,
        "A step is bad if its gradient norm, before clipping, is this many times the"
        " smoothed norm of earlier steps, such as 10; 0 disables this detector.",
        at_least=0,
    )
    divergence_rollback_steps: int = key(
        0,
        "With `rollback`, return to a checkpoint at least this many steps before the"
        " first bad step.",
        at_least=0,
    )
    divergence_max_rollbacks: int = key(
        3,
        "Number of rollbacks; at the next divergence the run ends instead.",
        at_least=0,
    )
