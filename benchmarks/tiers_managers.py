"""Orbax's own managers of RAM tiers, as sides of suite `tiers`.

These managers require state that is replicated over one mesh axis. All sides get such a
state: two replicas, each over two hosts.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import flags
from etils import epath
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint._src.multihost import multihost as orbax_processes
from orbax.checkpoint.experimental.emergency import (
    checkpoint_manager as emergency,
)
from orbax.checkpoint.experimental.emergency import (
    replicator_checkpoint_manager as replicator,
)
from orbax.checkpoint.experimental.emergency.p2p import args as p2p_args
from orbax.checkpoint.experimental.emergency.p2p import checkpoint_manager as p2p
from orbax.checkpoint.experimental.emergency.p2p import options as p2p_options

from benchmarks import tiers_hosts, turns
from elastic_ckpt.core import storage

_NEVER = 10**9


class Side(NamedTuple):
    """Begins a save and returns a function that waits for it; loads a step."""

    save: Callable[[int, Any], Callable[[], Any]]
    load: Callable[[int], Any]


def save_and_restore(host: tiers_hosts.Host) -> turns.Secs:
    """Saves and loads with each of Orbax's managers and with ours."""
    place, ours = host.place, host.ours
    initialize()
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("replica", "data"))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    abstract = tiers_hosts.abstract(place, sharding)
    directory = place.machines[host.number]
    managers = {
        "p2p": p2p.CheckpointManager(
            mesh,
            abstract,
            _made(directory, "p2p"),
            options=p2p_options.CheckpointManagerOptions(
                local=p2p_options.LocalCheckpointOptions(save_interval_steps=1)
            ),
        ),
        "emergency": emergency_manager(directory, place.orbax, mesh, abstract, every=1),
        "replicator": replicator.ReplicatorCheckpointManager(
            _made(directory, "replicator"),
            options=replicator.ReplicatorCheckpointManagerOptions(
                save_interval_steps=1
            ),
            global_mesh=mesh,
        ),
    }

    def save_ours(step: int, state: Any) -> Callable[[], Any]:
        response = ours.save_async(step, state)
        assert response is not None
        return response.result

    sides = {"ours": Side(save_ours, lambda step: ours.load(step, abstract))}
    for name, manager in managers.items():
        made = p2p_args.Composite if name == "p2p" else ocp.args.Composite
        sides[name] = side_of(manager, made, abstract)
    fresh_state = tiers_hosts.states(place, sharding)
    steps = {name: itertools.count(1) for name in sides}
    saves = {
        f"block_{name}": lambda state, name=name, side=side: side.save(
            next(steps[name]), state
        )
        for name, side in sides.items()
    }
    secs = tiers_hosts.in_turns(
        place, saves, prepare=fresh_state, finish=lambda wait: wait()
    )
    loads = {
        f"load_{name}": lambda _, side=side: jax.block_until_ready(
            side.load(place.rounds + 1)
        )
        for name, side in sides.items()
    }
    secs |= tiers_hosts.in_turns(place, loads)
    for manager in managers.values():
        manager.close()
    return secs


def initialize() -> None:
    """Does the setup that the managers expect from a program."""
    flags.FLAGS.mark_as_parsed()
    orbax_processes.initialize_runtime_to_distributed_ids()
    orbax_processes.initialize_distributed_to_device_ids()


def emergency_manager(
    ram: str, stored: str, mesh: Mesh, abstract: Any, *, every: int
) -> emergency.CheckpointManager:
    """Orbax's emergency manager, which only saves to `ram`, a directory of this host.

    Replicas are along the first axis of `mesh`; all hosts share the directory `stored`.
    """
    return emergency.CheckpointManager(
        _made(ram, "emergency"),
        _made(stored, "emergency"),
        mesh,
        abstract,
        options=emergency.CheckpointManagerOptions(
            local=emergency.LocalCheckpointOptions(
                save_interval_steps=every, max_to_keep=1
            ),
            persistent=emergency.PersistentCheckpointOptions(
                save_interval_steps=_NEVER
            ),
            replica_axis_index=0,
        ),
    )


def side_of(manager: Any, composite: Any, abstract: Any) -> Side:
    """A manager as a side; `composite` creates the arguments for its calls."""
    restore = ocp.args.PyTreeRestore(
        abstract, restore_args=ocp.checkpoint_utils.construct_restore_args(abstract)
    )

    def save(step: int, state: Any) -> Callable[[], Any]:
        assert manager.save(step, args=composite(state=ocp.args.PyTreeSave(state)))
        return manager.wait_until_finished

    return Side(
        save=save,
        load=lambda step: manager.restore(step, args=composite(state=restore)).state,
    )


def _made(directory: str, name: str) -> epath.Path:
    return storage.make_directory(os.path.join(directory, name))
