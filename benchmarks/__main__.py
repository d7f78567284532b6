"""The entry point of all benchmarks: `python -m benchmarks SUITE [--json FILE]`."""

from __future__ import annotations

import argparse
import importlib
import os

from benchmarks import SMALL, report

SUITES = {
    "first_light": "the demo: time to the first step and to the end",
    "data": "packed tokens per second from Parquet and text, compared with peers",
    "sidecar": "how long a loop waits for data, compared with MaxText's own sidecar",
    "accelerator": "a loop on a GPU or TPU with its data and saves; replicas",
    "scale": "the decisions of a save and a restore: 10,000 hosts, 1e6 boxes",
    "tiers": "saves and restores in RAM, compared with plain copies and Orbax; peers",
    "every_step": "a save in each step, with a copy at a peer",
    "follow": "a follower of steps in RAM: bytes moved, slowdown of the trainer",
    "recovery": "lost slices: recovery time, lost steps; compared with Orbax; the loop",
    "soak": "runs with a hundred faults, on disk and in buckets",
    "simulation": "real runs that fail, compared with simulations of the same failures",
    "verdicts": "faults of 40 kinds and the run's verdict on each",
    "storage": "size of the step log; data and steps in buckets, compared with Orbax",
    "universal": "loads of different layouts over plain loads; conversions; plans",
    "data_state": "the size of a data state; a thousand datasets in one process",
}


def main() -> None:
    """Runs a suite, prints its table, and optionally writes the table to a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("suite", choices=SUITES, help=str(SUITES))
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument(
        "--repeat", type=int, default=1, help="number of runs, for more samples"
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
