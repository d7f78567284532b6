"""`elastic-ckpt report RUN`: one HTML page about a run, with plots, in one file.

The page is self-contained. It includes an audit, which rereads the run's data;
`--no-audit` skips it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

from elastic_ckpt.core import storage
from elastic_ckpt.inspect import page
from elastic_ckpt.training import report

_FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--output", help=f"the file to write; by default RUN/{_FILE}")
    parser.add_argument(
        "--no-audit",
        action="store_true",
        help="skip the audit, which rereads the data",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the page and prints its path."""
    # Before the audit, which may take a long time.
    page.library()
    record = report.collect(arguments.run)
    if not arguments.no_audit:
        print("auditing; --no-audit skips this", file=sys.stderr, flush=True)
        record = dataclasses.replace(record, audit=report.audit(arguments.run))
    path = arguments.output or os.path.join(arguments.run, _FILE)
    storage.write_atomic(path, report.report(record).encode())
    print(f"wrote {path}")
    return 0
