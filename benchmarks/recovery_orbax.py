"""A job that saves with Orbax alone, as a peer of suite `recovery`.

The same step and batches as of the run that it is compared with. When a process dies,
the launcher kills the others and starts all anew: it reacts to the death at once, the
machine is there at once, and JAX's compilation cache is warm. A process of the job is
`python -m benchmarks.recovery_orbax`.

* `plain`: Orbax's checkpointer, to a directory on the disk.
* `emergency`: Orbax's emergency `CheckpointManager`, to a RAM disk for each process,
  with a replica of the state in each.
"""

from __future__ import annotations

import json
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from elastic_ckpt.elastic import member, multicontroller
from elastic_ckpt.training import load

_SAVED_STEP = 3
_LOOK_SECS = 0.01
_PATIENCE_SECS = 600.0
_STEPS = "steps.jsonl"


class RestartError(Exception):
    """The job did not restart; the message has the end of its output."""


def restart_secs(
    manager: str, config: pathlib.Path, directory: pathlib.Path, *, hosts: int
) -> float:
    """From the death of a process to the first step after it.

    Raises:
      RestartError: if it did not restart.
    """
    directory.mkdir(parents=True)
    job: list[subprocess.Popen[bytes]] = []
    try:
        job += _started(manager, config, directory, hosts)
        # The step that is restored, and more after it.
        _wait_for(job, directory, lambda step: step > _SAVED_STEP)
        began = time.time()
        job[1].send_signal(signal.SIGKILL)
        while job[1].poll() is None:
            time.sleep(_LOOK_SECS)
        _end(job)
        (directory / _STEPS).unlink()
        job[:] = _started(manager, config, directory, hosts)
        return _wait_for(job, directory, lambda step: step == _SAVED_STEP + 1) - began
    finally:
        _end(job)


def _started(
    manager: str, config: pathlib.Path, directory: pathlib.Path, hosts: int
) -> list[subprocess.Popen[bytes]]:
    address = _free_address()
    job = []
    for host in range(hosts):
        arguments = map(str, (manager, config, directory, address, hosts, host))
        with (directory / f"host-{host}.log").open("ab") as log:
            job.append(
                subprocess.Popen(
                    [sys.executable, "-m", __name__, *arguments],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
    return job


def _free_address() -> str:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{reserved.getsockname()[1]}"


def _wait_for(
    job: Sequence[subprocess.Popen[bytes]],
    directory: pathlib.Path,
    is_awaited: Callable[[int], bool],
) -> float:
    # Until a step is done; its time.
    until = time.monotonic() + _PATIENCE_SECS
    while True:
        if (directory / _STEPS).exists():
            for line in (directory / _STEPS).read_text().splitlines():
                step, at = json.loads(line)
                if is_awaited(step):
                    return at
        ended = [host for host, process in enumerate(job) if process.poll() is not None]
        if ended or time.monotonic() > until:
            host = ended[0] if ended else 0
            text = (directory / f"host-{host}.log").read_text(errors="replace")
            raise RestartError(text[-3000:])
        time.sleep(_LOOK_SECS)


def _end(job: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in job:
        process.kill()
    for process in job:
        process.wait()


class _Manager(NamedTuple):
    # The newest step, or None; loads it; saves a step and waits.
    newest: Callable[[], int | None]
    load: Callable[[int], Any]
    save: Callable[[int, Any], object]


def _plain(directory: pathlib.Path, mesh: Any, abstract: Any, host: int) -> _Manager:
    from orbax.checkpoint import v1 as ocp

    del mesh, host
    checkpointer = ocp.training.Checkpointer(str(directory / "steps"))

    def newest() -> int | None:
        return None if checkpointer.latest is None else checkpointer.latest.step

    def load(step: int) -> Any:
        return checkpointer.load_checkpointables(step, {"state": abstract})["state"]

    def save(step: int, state: Any) -> object:
        return checkpointer.save_checkpointables(step, {"state": state}, force=True)

    return _Manager(newest, load, save)


def _emergency(
    directory: pathlib.Path, mesh: Any, abstract: Any, host: int
) -> _Manager:
    import orbax.checkpoint as ocp

    from benchmarks import tiers_managers

    tiers_managers.initialize()
    manager = tiers_managers.emergency_manager(
        str(directory / f"ram-{host}"),
        str(directory / "persistent"),
        mesh,
        abstract,
        every=_SAVED_STEP,
    )
    side = tiers_managers.side_of(manager, ocp.args.Composite, abstract)
    return _Manager(
        manager.latest_step, side.load, lambda step, state: side.save(step, state)()
    )


def _train(
    make: Callable[..., _Manager],
    config_path: pathlib.Path,
    directory: pathlib.Path,
    place: member.Member,
) -> None:
    config = load.load(config_path, [f"hosts={place.num_hosts}"])
    multicontroller.configure(config.world)
    with multicontroller.joined(place):
        import jax

        from elastic_ckpt.core import topology
        from elastic_ckpt.data import batch_size
        from elastic_ckpt.data.lm import pipeline
        from elastic_ckpt.frontend import configured_batches
        from elastic_ckpt.training import configured

        world = topology.present(place.num_hosts)
        mesh = topology.mesh_of(world)
        vocab_size = pipeline.vocab_size(config.data)
        batches = configured_batches(
            pipeline.from_config(config.data, vocab_size=vocab_size),
            config.data,
            mesh=mesh,
            global_batch_size=batch_size.schedule(config.data, world).at(0),
        )
        program = configured.program(config, mesh)
        manager = make(directory, mesh, program.abstract_state, place.host)
        newest = manager.newest()
        state = program.init() if newest is None else manager.load(newest)
        while True:
            state, report = program.step(state, next(batches))
            jax.block_until_ready(report)
            step = int(state["step"])
            if newest is None and step == _SAVED_STEP:
                manager.save(step, state)
            if place.host == 0:
                with (directory / _STEPS).open("a") as file:
                    file.write(json.dumps([step, time.time()]) + "\n")


if __name__ == "__main__":
    # One process of the job, until it is killed.
    manager, *paths, address, num_hosts, host = sys.argv[1:]
    config, directory = map(pathlib.Path, paths)
    place = member.Member(address=address, num_hosts=int(num_hosts), host=int(host))
    _train(_plain if manager == "plain" else _emergency, config, directory, place)
