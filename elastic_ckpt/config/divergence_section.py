"""The keys of callbacks, and of those that detect a divergence."""

from __future__ import annotations

import dataclasses

from elastic_ckpt.config.key import key


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceSection:
    """Callbacks of the training loop, and detectors of a loss that diverges."""

    training_callbacks: str = key(
        "",
        "Your own callbacks: `module:function`, a function of the configuration that"
        " returns them by name (elastic_ckpt.training.callbacks). Every host calls it."
        " Empty uses none.",
    )
    divergence_action: str = key(
        "off",
        "The action of all detectors below. `warn` reports a divergence; `stop` ends"
        " the run, and leaves the newest checkpoint from before the divergence as the"
        " newest one; `abort` ends it without a save; `rollback` goes back to that"
        " checkpoint, or to the beginning if there is none yet, and continues after the"
        " data that has been read by then. `off` has no detectors.",
        choices=("off", "warn", "stop", "abort", "rollback"),
    )
    divergence_non_finite: bool = key(
        True, "Act at once on a loss or gradient norm that is infinite or NaN."
    )
    divergence_patience_steps: int = key(
        10,
        "Consecutive bad steps before a detector acts; a loss that is not finite needs"
        " one.",
        at_least=1,
    )
    divergence_warmup_steps: int = key(
        100,
        "Steps of a run in which only a loss that is not finite counts.",
        at_least=0,
    )
    divergence_loss_smoothing: float = key(
        0.9,
        "Weight of the past in the smoothed loss, which is compared with its best value"
        " so far, and with a slower average.",
        at_least=0,
        below=1,
    )
    divergence_loss_margin: float = key(
        0.0,
        "A step is bad if the smoothed loss is so much above its best, in nats; 0"
        " disables it.",
        at_least=0,
    )
    divergence_loss_factor: float = key(
        0.0,
        "A step is bad if the smoothed loss is so many times its best, such as 1.5; 0"
        " disables it.",
        at_least=0,
    )
    divergence_slow_smoothing: float = key(
        0.99,
        "Weight of the past in the slower average of the loss.",
        at_least=0,
        below=1,
    )
    divergence_slow_margin: float = key(
        0.0,
        "A step is bad if the smoothed loss is so much above the slower average, in"
        " nats; 0 disables it.",
        at_least=0,
    )
    divergence_window_steps: int = key(
        50, "Steps of each of the two windows that are compared.", at_least=1
    )
    divergence_window_margin: float = key(
        0.0,
        "A step is bad if the mean loss of the last window is so much above that of the"
        " window before, in nats; 0 disables it.",
        at_least=0,
    )
    divergence_gradient_norm_factor: float = key(
        0.0,
        "A step is bad if its gradient norm, before clipping, is so many times the"
        " smoothed norm of the steps before, such as 10; 0 disables it.",
        at_least=0,
    )
    divergence_rollback_steps: int = key(
        0,
        "`rollback` goes back to a checkpoint at least so many steps before the first"
        " bad step.",
        at_least=0,
    )
    divergence_max_rollbacks: int = key(
        3, "How often a run goes back before it ends instead.", at_least=0
    )
