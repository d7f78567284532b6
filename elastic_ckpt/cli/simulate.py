"""`elastic-ckpt simulate CONFIG --hosts 10000 --days 30`: what failures would cost.

Prints goodput by cause, lost steps, restores by tier and bytes, for each setting of
`--vary`. `docs/pages/reference/simulate.md` explains the numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os

from elastic_ckpt.cli import overrides
from elastic_ckpt.core import option_numbers, storage
from elastic_ckpt.inspect import run_files
from elastic_ckpt.simulation import cluster, comparison, costs, study

_DAYS = 30.0
_DAY_SECS = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    overrides.add_arguments(parser, example="configs/demo_cpu.yml")
    parser.add_argument(
        "--hosts",
        type=option_numbers.positive_count,
        default=0,
        help="number of hosts of the cluster; by default those of the configuration",
    )
    parser.add_argument(
        "--slices",
        type=option_numbers.positive_count,
        default=0,
        help="number of slices; by default slices have as many hosts as configured",
    )
    parser.add_argument(
        "--rack-hosts",
        type=option_numbers.count,
        default=0,
        help="number of hosts in a rack; 0 for no racks",
    )
    parser.add_argument(
        "--days",
        type=option_numbers.positive_number,
        help=f"days to simulate; by default {_DAYS:g}, or with --trace until all steps"
        " are done",
    )
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="compare values of a key, of spares or of slices, separated by commas; if"
        " repeated, all combinations",
    )
    parser.add_argument(
        "--state-gib",
        type=option_numbers.positive_number,
        default=0.0,
        help="size of the state; by default that of the configured model",
    )
    parser.add_argument(
        "--fails",
        action="append",
        type=option_numbers.named_number,
        default=[],
        metavar="KIND=HOURS",
        help="the mean time between failures of a machine, slice, rack or process, or"
        " between hangs of a process (hang)",
    )
    parser.add_argument(
        "--repair",
        action="append",
        type=option_numbers.named_number,
        default=[],
        metavar="KIND=HOURS",
        help="the mean time until a machine, slice or rack is back after a failure",
    )
    parser.add_argument(
        "--seed",
        type=option_numbers.count,
        default=0,
        help="the seed of the failures",
    )
    parser.add_argument(
        "--trace", default="", help="a file with the failures, in place of random ones"
    )
    parser.add_argument(
        "--costs",
        help="the directory of a run, for the times that it took for a step and a save",
    )
    parser.add_argument(
        "--cost",
        action="append",
        type=option_numbers.named_number,
        default=[],
        metavar="NAME=VALUE",
        help="set one of these times, such as step_secs=10; may be repeated",
    )
    parser.add_argument("--output", help="the HTML page to write, with plots")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Prints the settings side by side."""
    days = arguments.days or (math.inf if arguments.trace else _DAYS)
    default = cluster.FailureModel(seed=arguments.seed)
    model = cluster.FailureModel(
        between_hours=dict(arguments.fails) or default.between_hours,
        repair_hours={**default.repair_hours, **dict(arguments.repair)},
        seed=arguments.seed,
    )
    measured = of_run(arguments.costs) if arguments.costs else costs.Costs()
    results = study.run(
        study.Study(
            config=arguments.config,
            overrides=arguments.overrides,
            cluster=study.Cluster(
                hosts=arguments.hosts,
                slices=arguments.slices,
                hosts_per_rack=arguments.rack_hosts,
            ),
            costs=measured.with_values(dict(arguments.cost)),
            failures=model,
            trace=arguments.trace,
            secs=days * _DAY_SECS,
            state_bytes=round(arguments.state_gib * 2**30),
        ),
        arguments.vary,
    )
    if arguments.output:
        length = "to the last step" if days == math.inf else f"{days:g} days"
        subtitle = f"{arguments.config}, {length}, seed {arguments.seed}"
        text = comparison.to_page(results, subtitle=subtitle)
        storage.write_atomic(arguments.output, text.encode())
    print(
        json.dumps(comparison.to_json(results), indent=2)
        if arguments.json
        else comparison.table(results)
    )
    return 0


def of_run(directory: str) -> costs.Costs:
    """The costs of the run in `directory`.

    Raises:
      RunError: if there is no run, or it has trained no step.
    """
    run_files.read(directory)
    measured = run_files.read_metrics(os.path.join(directory, run_files.METRICS))
    events = run_files.read_events(directory)
    return costs.measured(events, measured.get("run", ()), given=costs.Costs())
