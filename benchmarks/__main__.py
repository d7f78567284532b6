"""The front door of all benchmarks: `python -m benchmarks SUITE [--json FILE]`."""

from __future__ import annotations

import argparse
import importlib
import os

from benchmarks import SMALL, report

SUITES = {
    "first_light": "the demo: secs until it computes and ends; colocated next()",
    "data": "packed tokens a second from Parquet and from text, beside every peer",
    "sidecar": "how long a loop waits for its data, beside MaxText's own sidecar",
    "accelerator": "a loop on a GPU or TPU, beside its data and saves; replicas",
    "scale": "the decisions of a save and a restore: 10,000 hosts, 1e6 boxes",
    "tiers": "saves and restores in RAM, beside plain copies and Orbax; peers",
    "every_step": "a save in each step, with a copy at a peer and without",
    "follow": "a follower of steps in RAM: bytes over changed ones, slowdown",
    "recovery": "lost slices: until the first step, steps lost; loop; beside Orbax",
    "soak": "runs that a hundred faults hit, on disk and in buckets",
    "simulation": "real runs that fail beside simulations of the same failures",
    "verdicts": "faults of 40 kinds, and what the run says of each",
    "storage": "bytes of the step log; data and steps in buckets, beside Orbax",
    "universal": "loads of other layouts over plain ones, conversions, plans",
    "data_state": "the bytes of a state; a thousand datasets in one process",
}


def main() -> None:
    """Runs a suite, prints its table, and writes it where it is asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", choices=SUITES, help=str(SUITES))
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE too")
    parser.add_argument(
        "--repeat", type=int, default=1, help="run the suite so often; more samples"
    )
    parser.add_argument(
        "--small", action="store_true", help="only show that the suite runs"
    )
    arguments = parser.parse_args()
    if arguments.small:
        os.environ[SMALL] = "1"
    suite = importlib.import_module(f"benchmarks.{arguments.suite}")
    figures = report.merged([suite.measure() for _ in range(arguments.repeat)])
    print(report.table(figures))
    if arguments.json:
        report.write(arguments.json, figures)


if __name__ == "__main__":
    main()
