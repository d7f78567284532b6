"""`ec.elastic.Processes`: slices of host processes, on one or more machines."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from etils import epath

from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import (
    faults,
    host,
    station,
    watch,
)
from elastic_ckpt.elastic import machine as machine_supervisor
from elastic_ckpt.elastic.cluster import Cluster, TrainFunction
from elastic_ckpt.elastic.decision import Policy
from elastic_ckpt.elastic.host import Hardware
from elastic_ckpt.elastic.process_cluster import Machines, ProcessCluster

_NUMBER_VARIABLES = ("NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")


class Place(NamedTuple):
    """This machine's place among the machines of the run.

    Attributes:
      slices: the slice numbers on this machine.
      interface: the address at which the other machines reach this one.
    """

    slices: range
    interface: str


def place(
    num_machines: int,
    number: int | None,
    *,
    slices: int,
    interface: str,
    environment: Mapping[str, str],
    names: tuple[str, str] = ("machines", "machine"),
) -> Place:
    """This machine's place among the machines of the run.

    The environment supplies a missing `number` or `interface`. `names` are what
    messages call `num_machines` and `number`.

    Raises:
      ConfigError: if the values are missing or contradict each other.
    """
    # Imports JAX.
    from elastic_ckpt.core import addresses

    of_all, of_this = names
    if slices % num_machines:
        raise errors.ConfigError(
            f"slices={slices} cannot be divided evenly among {num_machines} machines;"
            f" set slices to a multiple of {of_all}"
        )
    given = {name: environment.get(name) for name in _NUMBER_VARIABLES}
    if number is not None:
        given = {of_this: str(number)}
    name, text = next((each for each in given.items() if each[1]), ("", ""))
    if not text:
        raise errors.ConfigError(
            f"{of_this} is not set, and the environment sets none of"
            f" {', '.join(_NUMBER_VARIABLES)}; set {of_this} to this machine's index,"
            f" from 0 to {num_machines - 1}"
        )
    if not text.isdecimal() or int(text) >= num_machines:
        raise errors.ConfigError(
            f"{name}={text} is not the index of one of the {num_machines} machines"
            f" ({of_all}); set {name} to an index from 0 to {num_machines - 1}"
        )
    each = slices // num_machines
    return Place(
        slices=range(int(text) * each, (int(text) + 1) * each),
        # Not the pod name, which DNS resolves only some time after the pod starts.
        interface=interface or environment.get("POD_IP") or addresses.of_the_head(),
    )


class Processes(ProcessCluster):
    """Slices of host processes, on one or more machines.

    Each host process imports the script that creates the cluster, so create it and call
    `run` under `if __name__ == "__main__":`.

    Args:
      slices: the total number of slices, on all machines of the run.
      hosts_per_slice: the number of host processes in each slice.
      devices_per_host: the number of devices of each process: CPU devices, or GPUs that
        no other process uses.
      hardware: `"cpu"` or `"gpu"`.
      ram: the RAM disk of the machine, such as `/dev/shm`. Each slice has a directory
        in it, `world.ram_directory`, which an agent that outlives the hosts serves.
        None if hosts do not store checkpoints in RAM.
      run: the run name, also used for the run's directories in `ram`.
      logs: the directory for the hosts' output; by default `logs/<run>`.
      jax_cache_dir: the directory of JAX's compilation cache; empty disables the cache.
      machines: the number of machines. Run the same program on each; the slices are
        assigned to the machines in order.
      machine: the index of this machine, from 0; by default `NODE_RANK`, `SLURM_NODEID`
        or `JOB_COMPLETION_INDEX` in the environment.
      shared: for a run on multiple machines, a directory that all of them can access,
        on a shared disk or in a bucket, such as the directory of `ec.Persistent`. The
        machine that leads stores its claim there, in `leaders/<number>.json`, with its
        address.
      interface: the address at which the other machines reach this one; by default
        `POD_IP`, or the address of its default route.
      machine_timeout_secs: the time after which a silent machine is lost; if it leads,
        its claim lapses.
      injected: faults to inject, in step order.
      limits: the time limits of the hosts; by default `ec.elastic.Limits()`.
      emit: a function called with an event when a slice is lost or rejoins before the
        first world; `run` uses its own `emit` afterward.

    Raises:
      ConfigError: if the arguments contradict each other, or the script creates the
        cluster outside the `if` above.
      RunError: if the agents of the RAM disk cannot be started.
    """

    def __init__(
        self,
        slices: int,
        *,
        hosts_per_slice: int = 1,
        devices_per_host: int = 1,
        hardware: str = "cpu",
        ram: str | os.PathLike[str] | None = None,
        run: str | None = None,
        logs: str | os.PathLike[str] | None = None,
        jax_cache_dir: str = "",
        machines: int = 1,
        machine: int | None = None,
        shared: epath.PathLike | None = None,
        interface: str = "",
        machine_timeout_secs: float = 10.0,
        injected: Sequence[faults.Fault] = (),
        limits: watch.Limits | None = None,
        emit: events.Emit | None = None,
    ) -> None:
        host.check_guarded("ec.elastic.Processes")
        counts = {
            "slices": slices,
            "hosts_per_slice": hosts_per_slice,
            "devices_per_host": devices_per_host,
            "machines": machines,
        }
        for name, number in counts.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise errors.ConfigError(
                    f"Processes({name}={number!r}): pass a positive integer"
                )
        if hardware not in ("cpu", "gpu"):
            raise errors.ConfigError(
                f"Processes(hardware={hardware!r}): Processes supports only 'cpu' and"
                " 'gpu'; for TPUs, use ec.elastic.Pathways"
            )
        for fault in injected:
            if fault.kind not in faults.OF_HOSTS and fault.target >= slices:
                raise errors.ConfigError(
                    f"Processes(injected=[{fault}]): the run has slices 0 to"
                    f" {slices - 1}; choose one of them"
                )
        if run is not None and (not run or run != os.path.basename(run)):
            raise errors.ConfigError(
                f"Processes(run={run!r}): pass a valid directory name, such as 'my_run'"
            )
        if ram is not None and run is None:
            raise errors.ConfigError(
                f"Processes(ram={os.fspath(ram)!r}) needs a run name for the run's"
                " directories there; pass run='my_run'"
            )
        own = Place(slices=range(slices), interface=station.LOOPBACK)
        if machines > 1:
            if shared is None:
                raise errors.ConfigError(
                    f"Processes(machines={machines}) needs a directory that all its"
                    " machines share, where the leading machine stores its claim; pass"
                    " shared='gs://bucket/my_run' or a directory on a shared disk"
                )
            own = place(
                *(machines, machine),
                slices=slices,
                interface=interface,
                environment=os.environ,
            )
        logs = os.path.join("logs", run or "") if logs is None else logs
        for name, directory in ("ram", ram), ("logs", logs):
            if directory is not None:
                _check_writable(name, os.fspath(directory))
        memory = None
        if ram is not None and run is not None:
            memory = host.SliceMemory(directory=os.path.abspath(ram), run=run)
        limits = limits or watch.Limits()
        station.warm_up(host.IMPORTS, os.fspath(shared or ""))
        self._station = station.Station(
            Hardware(
                hosts=slices * hosts_per_slice,
                slices=slices,
                devices_per_host=devices_per_host,
                hardware=hardware,
                jax_cache_dir=jax_cache_dir,
            ),
            slices=own.slices,
            memory=memory,
            log_directory=os.path.abspath(logs),
            interface=own.interface,
        )
        super().__init__(
            Machines(self._station),
            limits=limits,
            injected=injected,
            emit=emit or events.nobody,
        )
        # Used only with multiple machines.
        self._supervisor = functools.partial(
            machine_supervisor.MachineSupervisor,
            self._station,
            shared=storage.absolute(shared or ""),
            injected=injected,
            limits=limits,
            lost_secs=machine_timeout_secs,
        )

    def close(self) -> None:
        """Kills the hosts, stops the agents, and removes the executables."""
        super().close()
        self._station.close()


def supervise(
    cluster: Cluster,
    train: TrainFunction,
    lead: machine_supervisor.Lead,
    *,
    policy: Policy,
    emit: events.Emit,
) -> bool:
    """Supervises this machine, in a run on multiple machines, until the run ends.

    Returns:
      Whether the cluster has multiple machines; with only one, this does nothing.

    Raises:
      ConfigError: if `train` cannot be sent to hosts.
      RunError: if the run failed, with its first failure, or if no leader can be
        reached.
    """
    if not isinstance(cluster, Processes) or cluster._station.num_machines == 1:
        return False
    host.check_sent(train)
    own = cluster._station
    own.train = train
    same = {
        **dataclasses.asdict(own.hardware),
        "jax_cache_dir": "",
        "machines": own.num_machines,
    }
    cluster._supervisor(
        lead,
        kept=lambda: contextlib.nullcontext(emit),
        configured=hashlib.sha256(storage.canonical_json(same)).hexdigest(),
        policy=policy,
        show=emit,
    ).run()
    return True


def _check_writable(name: str, path: str) -> None:
    if not storage.is_local(path):
        raise errors.ConfigError(
            f"{name}={path!r} is not on this machine, but host processes append to"
            f" files there; set {name} to a local directory (to save steps to a bucket,"
            " use ec.Persistent)"
        )
    try:
        storage.make_directory(os.path.abspath(path))
        if not os.access(path, os.W_OK):
            raise PermissionError("the directory is not writable")
    except OSError as error:
        raise errors.ConfigError(
            f"Processes({name}={path!r}): {error}; pass a writable directory"
        ) from None
