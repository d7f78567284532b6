"""`elastic-ckpt scale RUN --slices N`: a live run continues on N slices.

The hosts leave after a step that they agree on, so that no step is lost, and the run
continues in another world. Slices that are left over are spares. The request lasts
until the next one, or until the run is started again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epy

from elastic_ckpt.core import errors, option_numbers
from elastic_ckpt.monitoring import progress

with epy.lazy_imports():
    from elastic_ckpt.elastic import scale_request
    from elastic_ckpt.inspect import run_files
    from elastic_ckpt.training import configured, run_directory

_LOOK_SECS = 0.5
_ENDS = ("run_finished", "run_stopped", "run_failed")
_SHOWN = ("world_leaving", "world_left", "world_started", "recovered", *_ENDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument("run", help="the directory of a live run")
    parser.add_argument(
        "--slices",
        type=option_numbers.positive_count,
        required=True,
        help="the number of slices to continue on",
    )
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="return at once; by default the change is shown until it is done",
    )


def run(arguments: argparse.Namespace) -> int:
    """Requests the number, and waits for the change."""
    directory, slices = arguments.run, arguments.slices
    files = run_files.RunFiles.read(directory)
    if files.is_own_loop:
        raise errors.RunError(
            f"{directory} was recorded by your own training loop, whose slices this"
            " command cannot change; change them where the loop calls ec.elastic.run"
        )
    config = run_directory.read_config(directory)
    if not config.elastic.elastic_enabled:
        raise errors.RunError(
            f"{directory} was not started with elastic_enabled=true; stop it, and start"
            " it again with another number of slices"
        )
    configured.check_request(config, slices)
    known = files.events()
    _check_alive(files, known)
    scale_request.write(directory, slices)
    if arguments.no_wait:
        print(f"requested {slices} slices; the run changes after an agreed step")
        return 0
    with progress.Progress(config.run.log_period) as shown:
        num_shown = len(known)
        while True:
            events = files.events()
            for event in events[num_shown:]:
                fields = {key: event[key] for key in event.keys() - {"time", "event"}}
                if event["event"] in _SHOWN:
                    shown(event["event"], **fields)
            num_shown = len(events)
            text = result(events, slices, known=len(known))
            if text is not None:
                print(text)
                return 0
            _check_alive(files, events[len(known) :])
            time.sleep(_LOOK_SECS)


def result(
    events: Sequence[Mapping[str, Any]], slices: int, *, known: int
) -> str | None:
    """The result of a request; None while it is not known.

    Args:
      events: of the run.
      slices: that were requested.
      known: the number of events before the request.
    """
    worlds: list[Sequence[int]] = []
    is_requested = False
    for number, event in enumerate(events):
        if event["event"] == "world_started":
            worlds.append(event["slices"])
        elif event["event"] == "scale_requested" and number >= known:
            is_requested, worlds = True, worlds[-1:]
            if [*worlds[-1]] == [*event["chosen"]]:
                break
        elif event["event"] == "recovered" and is_requested and len(worlds) > 1:
            break
    else:
        return None
    text = f"the run is on slices {', '.join(map(str, worlds[-1]))}"
    if len(worlds[-1]) < slices:
        text += f"; {slices} are requested, and it takes more when they are there"
    return text


def _check_alive(
    files: run_files.RunFiles, events: Sequence[Mapping[str, Any]]
) -> None:
    is_ended = bool(events) and events[-1]["event"] in _ENDS
    if is_ended or files.is_alive is False:
        raise errors.RunError(
            f"{files.directory} is not running; start it with slices=N instead"
        )
