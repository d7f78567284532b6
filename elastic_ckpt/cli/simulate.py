"""`elastic-ckpt simulate CONFIG --state-gib 100`: what failures cost, and what helps.

Prints goodput, lost steps and the causes of lost time of a run in simulated time: as
configured, with one more spare slice, and with different save periods. The guide to
elastic runs explains this.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping

from elastic_ckpt.cli import option_numbers, shared
from elastic_ckpt.inspect import run_files
from elastic_ckpt.simulation import failures, plan, simulated_cluster
from elastic_ckpt.training import load

_DAYS = 30.0
_DAY_SECS = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    shared.add_config(parser, example="configs/demo_cpu.yml")
    parser.add_argument(
        "--state-gib",
        type=option_numbers.positive_number,
        required=True,
        help="size of the model's state: weights and optimizer",
    )
    parser.add_argument(
        "--days",
        type=option_numbers.positive_number,
        help=f"days to simulate; by default {_DAYS:g}, or with --trace until all steps"
        " are done",
    )
    parser.add_argument(
        "--machine-hours",
        type=option_numbers.positive_number,
        default=6300.0,
        help="the mean number of hours between failures of a machine; each failure"
        " takes down its slice",
    )
    parser.add_argument(
        "--repair-hours",
        type=option_numbers.positive_number,
        default=4.0,
        help="the mean number of hours until a lost slice is back",
    )
    parser.add_argument(
        "--seed",
        type=option_numbers.count,
        default=0,
        help="the random seed of the failures",
    )
    parser.add_argument(
        "--trace",
        help="a run directory; replay this run's failures instead of random ones",
    )
    parser.add_argument(
        "--costs",
        help="a run directory; use the times that this run's steps and changes took",
    )
    parser.add_argument(
        "--cost",
        action="append",
        type=option_numbers.named_number,
        default=[],
        metavar="NAME=VALUE",
        help="set one cost, such as step_secs=10; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the run and its alternatives in columns."""
    days = arguments.days or (math.inf if arguments.trace else _DAYS)
    costs = of_run(arguments.costs) if arguments.costs else plan.Costs()
    planned = plan.of_config(
        load.load(arguments.config, arguments.overrides),
        costs=costs.with_values(dict(arguments.cost)),
        state_bytes=round(arguments.state_gib * 2**30),
        secs=days * _DAY_SECS,
    )
    size = {
        "slices": planned.slices,
        "hosts_per_slice": planned.hosts_per_slice,
    }
    if arguments.trace:
        run_files.read(arguments.trace)
        trace = failures.of_log(run_files.read_events(arguments.trace), **size)
    else:
        trace = failures.draw(
            **size,
            secs=planned.secs,
            machine_hours=arguments.machine_hours,
            repair_hours=arguments.repair_hours,
            seed=arguments.seed,
        )
    outcomes = {
        name: simulated_cluster.simulate(each, trace)
        for name, each in plan.alternatives(planned).items()
    }
    if arguments.json:
        listed = [
            {"setting": name, **dataclasses.asdict(outcome)}
            for name, outcome in outcomes.items()
        ]
        print(json.dumps(listed, indent=2))
    else:
        print(table(outcomes))
    return 0


def table(outcomes: Mapping[str, simulated_cluster.Outcome]) -> str:
    """The outcomes as human-readable columns."""
    lines = {"": list(outcomes)}
    for outcome in outcomes.values():
        causes = outcome.secs
        percent = 100 / max(sum(causes.values()), 1e-9)
        cells = {
            "goodput %": f"{outcome.goodput_percent:.2f}",
            "steps": f"{outcome.steps:,}",
            "rows": f"{outcome.rows:,}",
            "steps lost": f"{outcome.steps_lost:,}",
            "worlds lost": f"{outcome.losses:,}",
            "restarts": f"{outcome.restarts:,}",
            **{f"from {tier}": f"{n:,}" for tier, n in outcome.restores.items()},
            **{f"{name} %": f"{percent * secs:.3f}" for name, secs in causes.items()},
        }
        for label, cell in cells.items():
            lines.setdefault(label, []).append(cell)
    return "\n".join(
        f"{label:<14}" + "".join(f"{cell:>24}" for cell in cells)
        for label, cells in lines.items()
        # Causes that took no time are omitted.
        if {*cells} != {"0.000"}
    )


def of_run(directory: str) -> plan.Costs:
    """The costs of the run in `directory`.

    Raises:
      RunError: if the run does not exist or has not trained a step.
    """
    run_files.read(directory)
    measured = run_files.read_metrics(os.path.join(directory, run_files.METRICS))
    lines = [*itertools.chain.from_iterable(measured.values())]
    return plan.measured(run_files.read_events(directory), lines)
