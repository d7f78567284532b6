"""Joins this process to a world of JAX processes, and chooses its devices."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator

import jax
from jax._src import config as jax_config
from jax._src import distributed, xla_bridge
from jax._src.lib import _jax

from elastic_ckpt.core import addresses, errors, storage
from elastic_ckpt.elastic import member, termination, watch
from elastic_ckpt.elastic.hardware import Hardware


def configure(world: Hardware, *, slot: int | None = None) -> None:
    """Chooses the devices; must be called before any other use of JAX.

    Args:
      world: with the devices of a host.
      slot: the number of this host on its machine, whose GPUs it uses alone; None for a
        process that uses all of them.
    """
    jax.config.update("jax_platforms", _PLATFORMS[world.hardware])
    gpus = None if slot is None else world.gpus(slot)
    if world.hardware == "gpu" and gpus is not None:
        visible = ",".join(map(str, gpus))
        jax.config.update("jax_cuda_visible_devices", visible)
        jax.config.update("jax_rocm_visible_devices", visible)
    jax.config.update("jax_num_cpu_devices", world.devices_per_host)
    if world.jax_cache_dir:
        directory = storage.absolute(os.path.expanduser(world.jax_cache_dir))
        jax.config.update("jax_compilation_cache_dir", os.fspath(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def check_devices(hardware: str) -> None:
    """Raises a RunError if JAX has fallen back to CPUs, as it does without CUDA."""
    if hardware != "cpu" and jax.default_backend() == "cpu":
        raise errors.RunError(
            f"hardware={hardware}, but JAX finds only CPUs on {socket.gethostname()}:"
            f" {jax.local_devices()}; install JAX for your accelerator (jax[cuda12])"
            " and check its driver, or set hardware=cpu"
        )


def join_outer_launcher() -> bool:
    """Joins the world of an outer launcher that JAX detects (Slurm, JobSet, TPU pods).

    Returns:
      Whether there is an outer launcher; if not, nothing has changed.
    """
    try:
        with warnings.catch_warnings():
            # In every Kubernetes pod JAX recommends to install its k8s extra.
            warnings.simplefilter("ignore")
            jax.distributed.initialize()
    except ValueError as error:
        if "coordinator_address should be defined" in str(error):
            return False
        raise
    return True


# The longest time to join, if the supervisor does not end the hosts before. When it is
# over JAX aborts all hosts, and does not name the one that is missing.
_JOIN_SECS = 900
# The limit of a try to reach host 0, and the time between two: it is about to listen.
_TRY_SECS = 5.0
_REACH_SECS = 0.02


@contextlib.contextmanager
def joined(
    place: member.Member, *, begin: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Joins the world; at the end of the body leaves it together with all hosts.

    If the body raises, JAX is not shut down: the process must end.

    Args:
      place: of this host.
      begin: called with each phase that begins: to reach host 0, and to wait there for
        the others.

    Raises:
      RunError: if this host does not reach host 0.
    """
    begin(watch.REACH)
    if place.host:
        _reach(place)
    begin(watch.JOIN)
    jax.distributed.initialize(
        place.address,
        num_processes=place.num_hosts,
        process_id=place.host,
        coordinator_bind_address=place.address,
        cluster_detection_method="deactivate",
        initialization_timeout=_JOIN_SECS,
    )
    _collect_over_the_same_network()
    # From here on JAX's preemption service receives the signal.
    termination.release()
    yield
    # The coordination service ends with host 0; hosts still connected would fail.
    jax.distributed.shutdown()


def _collect_over_the_same_network() -> None:
    # By default the CPU's collectives use the address of the machine's own name, which
    # is often a loopback address that other machines cannot reach.
    def make_client() -> object:
        return xla_bridge.make_cpu_client(
            _jax.make_gloo_tcp_collectives(
                distributed_client=distributed.global_state.client,
                hostname=addresses.of_this_host(),
            )
        )

    if jax_config.cpu_collectives_implementation.value == "gloo":
        xla_bridge.register_backend_factory(
            "cpu", make_client, priority=0, fail_quietly=False
        )


# The CPU is always included: colocated data iterators use its devices.
_PLATFORMS = {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}


def _reach(place: member.Member) -> None:
    # Returns when host 0 accepts connections.
    host, port = place.address.rsplit(":", 1)
    began_secs = time.monotonic()
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), _TRY_SECS).close()
        except OSError as error:
            if time.monotonic() - began_secs > _JOIN_SECS:
                raise errors.RunError(
                    f"host {place.host} has not reached host 0 at {place.address} in"
                    f" {_JOIN_SECS} s ({error}); check the network between them"
                ) from error
            time.sleep(_REACH_SECS)
        else:
            return
