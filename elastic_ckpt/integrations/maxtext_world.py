"""A host's MaxText in a world of an elastic run: when it leaves, and what it reports.

MaxText asks at the end of each step whether it is about to be preempted; the answer is
whether this world is left. Steps in events have MaxText's numbers, from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic_ckpt.elastic.world import World
from elastic_ckpt.integrations import maxtext_seams

Functions = dict[maxtext_seams.Seam, Callable[..., Any]]


def functions(world: World, originals: Functions) -> Functions:
    """The functions that replace those of MaxText on a host of `world`."""
    host = _Host(world, originals)
    return {
        maxtext_seams.REACHED_PREEMPTION: host.reached_preemption,
        maxtext_seams.MAKE_LOGGER: host.metric_logger,
    }


class _Host:
    def __init__(self, world: World, originals: Functions) -> None:
        self._world = world
        self._originals = originals
        # The newest step that MaxText asked about, and the answer.
        self._asked = (-1, False)
        self._last_step = -1

    def reached_preemption(self, checkpoint_manager: Any, step: int) -> bool:
        """Whether all hosts save this step and leave; MaxText asks several times.

        The last step ends the run, and is not left.
        """
        del checkpoint_manager
        if step != self._asked[0] and step != self._last_step:
            self._asked = (step, self._world.is_leaving(step))
        return self._asked[1]

    def metric_logger(
        self, config: Any, learning_rate_schedule: Any, start_step: int = 0
    ) -> Any:
        """Makes MaxText's logger of metrics, which reports each step as an event, too.

        It is made when the state is restored, before the first step.
        """
        made = self._originals[maxtext_seams.MAKE_LOGGER](
            config, learning_rate_schedule, start_step
        )
        self._last_step = config.steps - 1
        write = made.write_metrics

        def write_and_report(
            metrics: Mapping[str, Any], step: int, metric_type: str = "train"
        ) -> None:
            write(metrics, step, metric_type)
            if metrics and metric_type == "train":
                self._report(step, config.steps, metrics["scalar"])

        made.write_metrics = write_and_report
        topology = self._world.topology
        self._world.emit(
            "run_started",
            run=config.run_name,
            hosts=topology.hosts,
            slices=topology.slices,
            devices=topology.devices,
            start_step=start_step,
            steps=config.steps,
        )
        return made

    def _report(self, step: int, steps: int, scalars: Mapping[str, Any]) -> None:
        self._world.emit(
            "step",
            step=step,
            steps=steps,
            loss=float(scalars["learning/loss"]),
            secs=float(scalars["perf/step_time_seconds"]),
            tokens=int(scalars["learning/total_weights"]),
            learning_rate=float(scalars["learning/current_learning_rate"]),
        )
