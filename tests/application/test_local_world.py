"""The share of the machine that hosts of the local launcher get, and their devices."""

import contextlib
import multiprocessing

import jax
import pytest

from elastic_ckpt.application import configured
from elastic_ckpt.config import load, schema
from elastic_ckpt.core import errors
from elastic_ckpt.data.lm import token_blocks
from elastic_ckpt.elastic import (
    cluster,
    decision,
    host_process,
    member,
    multicontroller,
    world_host,
)
from tests import runs


def test_hosts_of_one_machine_share_its_cores_for_tokenising(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(token_blocks, "_num_cores", lambda: 12)
    monkeypatch.setattr(multicontroller, "configure", lambda *_, **__: None)
    monkeypatch.setattr(
        multicontroller, "joined", lambda *_, **__: contextlib.nullcontext()
    )
    monkeypatch.setattr(host_process.HostChannel, "wait", lambda _: None)
    threads = []
    _, pipe = multiprocessing.Pipe()
    for num_hosts in (1, 3):
        place = member.Member(address="127.0.0.1:1", num_hosts=num_hosts, host=0)
        work = decision.Train(slices=(0,), spares=(), rows=8, accumulated=1)
        world_host.run_host(
            lambda _: threads.append(token_blocks.num_threads(0)),
            schema.WorldSection(hosts=num_hosts),
            cluster.Assignment(number=1, work=work),
            world_host.Owned(memory=None, kept=None, grace_secs=60),
            place,
            host_process.HostChannel(pipe),
        )
    assert threads == [12, 4]


def checked(directory, **settings):
    path = runs.write_config(
        directory,
        str(directory / "corpus"),
        **{"hosts": 4, "slices": 4, "global_batch_size": 24, **settings},
    )
    configured.check_local(load.load(path))


def test_hosts_are_started_on_cpus_and_gpus(tmp_path):
    checked(tmp_path, hardware="cpu")
    checked(tmp_path, hardware="gpu", devices_per_host=2)
    with pytest.raises(errors.ConfigError, match="hosts=4 with hardware=tpu"):
        checked(tmp_path, hardware="tpu")


def test_a_ram_disk_is_a_directory_of_the_machine(tmp_path):
    with pytest.raises(errors.ConfigError, match="='gs://b/ram' is not a directory on"):
        checked(tmp_path, local_checkpoint_directory="gs://b/ram")


def test_nothing_is_compiled_ahead_where_shadow_worlds_have_no_devices(tmp_path):
    path = runs.write_config(tmp_path, "", elastic_enabled=True, hosts=2, slices=2)
    for hardware, secs in (("cpu", 600.0), ("gpu", 0.0)):
        config = load.load(path, [f"hardware={hardware}"])
        assert configured.limits(config).compile_ahead_secs == secs


@pytest.mark.parametrize(
    ("first_slice", "slices", "slots"),
    [(0, (0, 1, 2), [0, 1, 2, 3, 4, 5]), (0, (0, 2), [0, 1, 4, 5]), (4, (5,), [2, 3])],
)
def test_a_host_has_the_same_devices_in_all_worlds(first_slice, slices, slots):
    owned = world_host.Owned(
        memory=None, kept=None, grace_secs=60, first_slice=first_slice
    )
    num_hosts = len(slots)
    members = [
        member.Member(address="127.0.0.1:1", num_hosts=num_hosts, host=host)
        for host in range(num_hosts)
    ]
    assert [owned.slot(each, slices) for each in members] == slots


def test_hosts_of_a_machine_see_different_gpus(monkeypatch):
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    hardware = schema.WorldSection(hardware="gpu", devices_per_host=4)
    multicontroller.configure(hardware)
    assert "jax_cuda_visible_devices" not in updates
    multicontroller.configure(hardware, slot=2)
    assert updates["jax_platforms"] == "cuda,cpu"
    assert updates["jax_cuda_visible_devices"] == "8,9,10,11"


@pytest.mark.parametrize("hardware", ["gpu", "tpu"])
def test_a_host_without_its_accelerators_does_not_compute_on_cpus(hardware):
    multicontroller.check_devices("cpu")
    problem = f"hardware={hardware}, but JAX finds only CPUs on .* set hardware=cpu"
    with pytest.raises(errors.RunError, match=problem):
        multicontroller.check_devices(hardware)
