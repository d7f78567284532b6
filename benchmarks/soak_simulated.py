"""A soaked run, simulated: `elastic-ckpt simulate` under the faults that it had."""

from __future__ import annotations

import pathlib

from elastic_ckpt.application import run_directory
from elastic_ckpt.cli import simulate
from elastic_ckpt.core import storage
from elastic_ckpt.simulation import (
    configured,
    decisions,
    simulated_run,
    trace,
    trace_of_run,
    world_layout,
)
from elastic_ckpt.simulation.costs import Costs
from elastic_ckpt.simulation.run_plan import Outcome

_TRACE = "trace.jsonl"
# The state of the soaked model; its bytes cost next to nothing.
_STATE_BYTES = 2**21


def costs_of(run: pathlib.Path) -> Costs:
    """The costs that the run in a directory has paid."""
    return simulate.of_run(str(run))


def simulated(run: pathlib.Path, costs: Costs) -> Outcome:
    """The run in a directory under its own faults, until it has done its steps.

    Its trace is written beside its events.

    Args:
      run: its directory.
      costs: of this run, or of another one.
    """
    config = run_directory.read_config(str(run))
    plan = configured.plan(
        config, configured.Cluster(), costs=costs, state_bytes=_STATE_BYTES
    )
    size = plan.hardware
    faults = trace_of_run.trace_of_run(
        run_directory.read_events(str(run)), hosts_per_slice=size.hosts_per_slice
    )
    storage.write_atomic(run / _TRACE, trace.to_bytes(faults))
    numbers = {target: size.number_of(target) for target in ("slice", "machine")}
    return simulated_run.simulate(
        plan,
        trace.read(str(run / _TRACE), numbers=numbers),
        decisions.Decisions(
            world_layout.WorldLayout(state_bytes=_STATE_BYTES),
            configured.copies(config),
        ),
    )
