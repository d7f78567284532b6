"""`elastic-ckpt train CONFIG key=value...`: trains or continues one run.

It parses and prints; `training` does the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Iterator

from absl import logging
from etils import epy

from elastic_ckpt.cli import shared
from elastic_ckpt.core import bucket_clients, errors, events
from elastic_ckpt.elastic import failures, termination
from elastic_ckpt.monitoring import progress
from elastic_ckpt.training import journal, load, schema

with epy.lazy_imports():
    from elastic_ckpt.core import topology
    from elastic_ckpt.elastic import host, pathways
    from elastic_ckpt.training import configured, launch, trainer

_EXAMPLES = """\
Examples:

  elastic-ckpt train configs/demo_cpu.yml
  elastic-ckpt train configs/demo_cpu.yml slices=2 hosts=2 steps=190    # continue
  elastic-ckpt config configs/demo_cpu.yml slices=2 hosts=2    # what would run
  elastic-ckpt config    # every key with its default and meaning
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    shared.add_config(parser, example="configs/demo_cpu.yml")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES


def run(arguments: argparse.Namespace) -> int:
    """Prepares the data, finds or starts the world, and trains.

    Returns:
      0 when the run has trained all of its steps, 143 if SIGTERM stopped it earlier,
      and 130 if Ctrl-C did.
    """
    config = load.load(arguments.config, arguments.overrides)
    if not config.run.run_name:
        raise errors.ConfigError(
            "run_name is empty; set it, for example run_name=first"
        )
    configured.check_checkpoints(config)
    with (
        termination.ending("elastic-ckpt train"),
        progress.Progress(config.run.log_period) as shown,
    ):
        is_stopped = _start(config, shown)
    return termination.exit_code() if is_stopped else 0


def _start(config: schema.Config, shown: progress.Progress) -> bool:
    # Trains, and returns whether the run was asked to stop before its last step.
    world, is_elastic = config.world, config.elastic.elastic_enabled
    if config.elastic.elastic_machines > 1:
        place = launch.place(config, os.environ)
        launch.warm_up(journal.path_of(config))
        host.configure(world)
        configured.check_local(config)
        return launch.on_hosts(_with_files(config), shown, place=place)
    if world.enable_single_controller:
        pathways.initialize()
        run = _run_slices if is_elastic else _run_here
        return run(config, shown)
    # Before looking for an outer launcher, because imports take seconds.
    starts_hosts = world.hosts > 1 or (
        is_elastic and not configured.is_simulated(config)
    )
    if starts_hosts:
        launch.warm_up(journal.path_of(config))
    host.configure(world)
    if host.join_outer_launcher():
        return _run_here(config, shown)
    configured.check_local(config)
    run = _run_slices if starts_hosts or is_elastic else _run_here
    is_stopped = run(config, shown)
    path = journal.path_of(config)
    print(f"check it: elastic-ckpt audit {path}")
    print(f"look at it: elastic-ckpt report {path}")
    return is_stopped


def _run_here(config: schema.Config, shown: progress.Progress) -> bool:
    host.check_hardware(config.world.hardware)
    config = _with_files(config)
    directory = journal.path_of(config)
    listeners = journal.listening(directory, config.metrics)
    if not topology.is_primary():
        shown.close()
        with listeners, trainer.alone(config, events.nobody) as world, _in_words():
            return trainer.train(config, world)
    with (
        journal.kept(directory, shown, listeners=listeners) as emit,
        trainer.alone(config, emit, ended=emit.stopped_early) as world,
        _in_words(),
    ):
        return trainer.train(config, world)


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    # Describes an exception of the program; the traceback goes to the log.
    try:
        yield
    except (errors.ElasticCkptError, *bucket_clients.failures()):
        raise
    except Exception as error:
        told = failures.of_exception(topology.this_host(), error)
        logging.error("%s", told.traceback)
        words = failures.judge([told], num_hosts=1, is_lost=False).words
        raise failures.ProgramFailedError(words, failures=[told]) from error


def _run_slices(config: schema.Config, shown: progress.Progress) -> bool:
    is_here = config.world.enable_single_controller or configured.is_simulated(config)
    run = launch.on_slices if is_here else launch.on_hosts
    return run(_with_files(config), shown)


def _with_files(config: schema.Config) -> schema.Config:
    return launch.with_files(config, report=functools.partial(print, flush=True))
