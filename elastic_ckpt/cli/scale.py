"""`elastic-ckpt scale RUN --slices N`: a live run continues on N slices.

The hosts leave after a step that they agree on, so no step is lost, and the run
continues in a new world; `status` shows the change. Surplus slices become spares. The
request lasts until the next request or until the run is restarted.
"""

from __future__ import annotations

import argparse

from elastic_ckpt.cli import option_numbers
from elastic_ckpt.core import errors
from elastic_ckpt.core.events import ENDS
from elastic_ckpt.elastic import scale_request
from elastic_ckpt.inspect import run_files, status
from elastic_ckpt.training import configured, journal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument("run", help="a live run's directory")
    parser.add_argument(
        "--slices",
        type=option_numbers.positive_count,
        required=True,
        help="the number of slices to continue on",
    )


def run(arguments: argparse.Namespace) -> int:
    """Requests the number of slices unless the run cannot change it."""
    directory, slices = arguments.run, arguments.slices
    record, config = run_files.read(directory), journal.read_config(directory)
    if record.program == "loop" or not config.elastic.elastic_enabled:
        raise errors.RunError(
            f"the run in {directory} was not started with elastic_enabled=true; restart"
            " it with a different number of slices. In your own training loop, change"
            " the slices where it calls ec.elastic.run"
        )
    configured.check_slices(config, slices)
    events, is_alive = run_files.read_events(directory), run_files.is_alive(directory)
    phase = status.phase(events, is_alive=is_alive, program=record.program)
    if is_alive is False or phase in ENDS:
        raise errors.RunError(
            f"the run in {directory} is not running; start it with slices={slices}"
            " instead"
        )
    scale_request.write(directory, slices)
    print(
        f"requested {slices} slices; the run changes after a step that its hosts agree"
        " on"
    )
    return 0
