"""Starts a configured run: in this process, or in host processes on its machines.

Imports JAX only where it is used, so that the fork server starts fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epy

from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.data import data_keys
from elastic_ckpt.elastic import (
    faults,
    host,
    process_cluster,
    processes,
    runtime,
    scale_request,
    station,
)
from elastic_ckpt.elastic.cluster import Cluster
from elastic_ckpt.elastic.machine import MachineSupervisor
from elastic_ckpt.elastic.processes import Place
from elastic_ckpt.elastic.world import World
from elastic_ckpt.training import configured, journal, load, schema
from elastic_ckpt.training.configured import Groups

with epy.lazy_imports():
    from elastic_ckpt.core import topology
    from elastic_ckpt.data import datasets
    from elastic_ckpt.data.lm import text
    from elastic_ckpt.data.sources import files
    from elastic_ckpt.elastic import pathways
    from elastic_ckpt.training import trainer

# Trains on a host of a world.
Train = Callable[[schema.Config, World], object]
# Modules that the fork server imports so that slice changes do not wait for imports.
_HOST_IMPORTS = (
    *host.IMPORTS,
    __name__,
    "elastic_ckpt.training.trainer",
    "elastic_ckpt.monitoring.prometheus",
    "elastic_ckpt.monitoring.summaries",
    "elastic_ckpt.monitoring.tensorboard",
    "grain._src.python.dataset.transformations.slice",
)
# Keys that may differ between machines.
_OWN_KEYS = (
    "elastic_machine",
    "peer_interface",
    "peer_port",
    "peer_domains",
    "peer_tls_certificate",
    "peer_tls_key",
    "peer_tls_ca",
)
_MIXTURE = "grain_train_mixture_config_path"


def warm_up(directory: str = "") -> None:
    """Starts the fork server, which imports in the background; see `station`."""
    station.warm_up(_HOST_IMPORTS, directory)


def on_host(train: Train | None, config: schema.Config, world: World) -> None:
    """Trains on a host of a world, by default with the reference trainer.

    Can be pickled before JAX is imported.
    """
    with journal.listening_on_machine(config, host=topology.this_host()):
        (train or trainer.train)(config, world)


def on_hosts(
    config: schema.Config,
    show: events.Emit,
    *,
    place: Place | None = None,
    train: Train | None = None,
    program: Sequence[str] = (),
) -> bool:
    """Supervises this machine's hosts until the run has ended.

    Args:
      config: the run's configuration; its data files must exist.
      show: called with each event of the run, on the leading machine.
      place: this machine's place among the machines; None if it has all hosts.
      train: a picklable function that trains on each host; by default the reference
        trainer.
      program: words that identify what the hosts run, apart from the configuration;
        must be the same on all machines.

    Returns:
      Whether the run or this machine was asked to stop before the last step.

    Raises:
      RunError: if a host fails, with the first failure, after all hosts have exited;
        or if no leader can be reached.
      StoppedError: if SIGTERM arrived and the hosts did not stop in time.
    """
    of_host = functools.partial(on_host, train)
    limits, groups = configured.limits(config), configured.groups(config)
    directory, injected = journal.path_of(config), faults.parse(config.elastic.faults)
    # Otherwise, all hosts share one RAM disk, as on one machine.
    memory = configured.memory(config) if config.elastic.elastic_enabled else None
    there: dict[str, Any] = {} if place is None else place._asdict()

    def own_station() -> contextlib.closing[station.Station]:
        return contextlib.closing(
            station.Station(
                config.world,
                memory=memory,
                log_directory=journal.logs_of(config),
                **there,
            )
        )

    def kept() -> contextlib.AbstractContextManager[journal.Journal]:
        return journal.kept(
            directory,
            show,
            # MaxText numbers its steps from 0.
            first_step=0 if program else 1,
            listeners=journal.listening_on_machine(config),
            # A disconnected or frozen leader would still hold a lock.
            is_locked=place is None,
        )

    lead = functools.partial(_run, config, of_host, groups)
    if place is None:
        with (
            kept() as emit,
            own_station() as own,
            process_cluster.ProcessCluster(
                process_cluster.Machines(own),
                limits=limits,
                injected=injected,
                emit=emit,
            ) as cluster,
        ):
            scale_request.remove(directory)
            lead(cluster, emit)
            return emit.is_stopped
    with own_station() as own:
        own.train = functools.partial(of_host, config)
        return MachineSupervisor(
            own,
            lead,
            shared=journal.steps_of(directory),
            injected=injected,
            limits=limits,
            lost_secs=config.elastic.elastic_machine_timeout_seconds,
            kept=kept,
            configured=_digest(config, program),
            policy=configured.policy(config, groups),
            show=show,
            begin=lambda: scale_request.remove(directory),
        ).run()


def on_slices(config: schema.Config, show: events.Emit) -> bool:
    """Trains in this process on the available slices until the run has ended.

    Pathways provides the slices, or CPU devices of this process simulate them. The data
    files must exist.

    Returns:
      Whether the run was asked to stop before the last step.

    Raises:
      ConfigError: if the hardware has a different number of slices or the slices do
        not support the configured faults.
      RunError: see `runtime.run`.
    """
    number, directory = config.world.slices, journal.path_of(config)
    listeners = journal.listening(directory, config.metrics)
    with journal.kept(directory, show, listeners=listeners) as emit:
        scale_request.remove(directory)
        if configured.is_simulated(config):
            slices = pathways.SimulatedSlices(number)
        else:
            slices = pathways.manager.Manager()
        if slices.total_slice_count != number:
            raise errors.ConfigError(
                f"slices={number}, but the hardware has {slices.total_slice_count}; set"
                f" slices={slices.total_slice_count}"
            )
        with pathways.Pathways(
            slices,
            injected=faults.parse(config.elastic.faults),
            grace_secs=configured.limits(config).grace_secs,
            ended=emit.stopped_early,
            emit=emit,
        ) as cluster:
            groups = configured.groups(config, topology.present(number))
            _run(config, trainer.train, groups, cluster, emit)
            return emit.is_stopped


def _run(
    config: schema.Config,
    train: Train,
    groups: Groups,
    cluster: Cluster,
    emit: events.Emit,
) -> None:
    # Trains on a cluster's available groups until the run has ended.
    chosen = configured.policy(config, groups)
    if config.elastic.elastic_enabled:
        chosen = scale_request.ScaledPolicy(journal.path_of(config), chosen)
    runtime.run(
        functools.partial(train, config),
        cluster=cluster,
        policy=chosen,
        work=configured.work(config, groups),
        emit=emit,
    )


def place(config: schema.Config, environment: Mapping[str, str]) -> Place:
    """The configured place of this machine among the machines of a run.

    Raises:
      ConfigError: if the place is missing or contradicts other keys.
    """
    section, world = config.elastic, config.world
    if not section.elastic_enabled:
        raise errors.ConfigError(
            f"elastic_machines={section.elastic_machines} needs elastic_enabled=true,"
            " because only an elastic run starts its own hosts on multiple machines;"
            " set elastic_enabled=true or elastic_machines=1"
        )
    if world.enable_single_controller:
        raise errors.ConfigError(
            f"elastic_machines={section.elastic_machines} with"
            " enable_single_controller=true: only a run with one process per host can"
            " have supervisors on multiple machines; set elastic_machines=1"
        )
    number = section.elastic_machine
    return processes.place(
        *(section.elastic_machines, number if number >= 0 else None),
        slices=world.slices,
        interface=config.tiers.peer_interface,
        environment=environment,
        names=("elastic_machines", "elastic_machine"),
    )


def _digest(config: schema.Config, program: Sequence[str]) -> str:
    shared = {k: v for k, v in load.values(config).items() if k not in _OWN_KEYS}
    named = [word for word in program if word.partition("=")[0] not in _OWN_KEYS]
    return hashlib.sha256(storage.canonical_json([shared, named])).hexdigest()


def with_files(
    config: schema.Config, *, report: Callable[[str], None] = lambda _: None
) -> schema.Config:
    """Makes data file names absolute and writes missing files from text files.

    Calls `report` with a line of text for each file written.

    Raises:
      ConfigError: if a file cannot be written in the configured format.
      DataError: if there are neither data files nor text files.
    """
    data = config.data
    directories = iter(part for part in data.text_directory.split(";") if part)
    listed = ["grain_train_files"] * (not data.grain_train_mixture_config_path)
    listed += ["grain_eval_files"] * bool(data.eval_interval)
    for key in listed:
        for dataset in datasets.from_list(getattr(data, key), key=key):
            if directory := next(directories, ""):
                _write(dataset.patterns, directory, data.grain_file_type, report)
            files.find_files(files.absolute(dataset.patterns))
    values = _absolute({key: vars(data)[key] for key in (_MIXTURE, *listed)})
    if data.data_stages:
        # Stores the stages themselves, because their file may change and the next
        # attempt may run elsewhere.
        stages = []
        for begin, stage in data_keys.stages(data):
            own = {k: v for k, v in vars(stage).items() if v != vars(data)[k]}
            stages.append({"begin_step": begin, **_absolute(own)})
        values["data_stages"] = json.dumps(stages)
    return dataclasses.replace(config, data=dataclasses.replace(data, **values))


def _absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    # Makes the file names in data settings absolute.
    absolute = dict(values)
    for key, value in values.items():
        if value and key == _MIXTURE:
            absolute[key] = os.fspath(storage.absolute(value))
        elif value and key in ("grain_train_files", "grain_eval_files"):
            listed = [
                dataclasses.replace(each, patterns=files.absolute(each.patterns))
                for each in datasets.from_list(value, key=key)
            ]
            absolute[key] = datasets.to_list(listed)
    return absolute


def _write(
    patterns: str, directory: str, file_type: str, report: Callable[[str], None]
) -> None:
    # Writes only a single file that does not exist yet.
    if set("*?[,") & set(patterns) or files.exists(patterns):
        return
    named_type = text.file_type(patterns) or file_type
    if named_type != file_type:
        raise errors.ConfigError(
            f"grain_file_type={file_type}, but text_directory would be written to"
            f" {patterns}, which has the name of a {named_type} file; set"
            f" grain_file_type={named_type} or rename the file"
        )
    written = text.write(directory, patterns, file_type=file_type)
    report(f"wrote {patterns}: {written.num_documents:,} documents")
