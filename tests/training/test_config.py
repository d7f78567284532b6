"""What a configuration asks for, in the plain values of the library."""

import dataclasses
from unittest import mock

import jax
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import data_keys
from elastic_ckpt.data.lm import documents
from elastic_ckpt.elastic import cluster, decision, host
from elastic_ckpt.tiers.choices import Local, Peers, Persistent, TlsFiles
from elastic_ckpt.training import batch_size, configured, launch, load, schema
from tests.refusals import training as refusals


def write(path, text):
    path.write_text(text)
    return path


def test_file_overrides_its_base_and_the_command_line_overrides_both(tmp_path):
    path = write(tmp_path / "run.yml", "base_config: base.yml\nhosts: 4\nsteps: 6\n")
    # The base of all defaults needs no file.
    world, run = schema.WorldSection(hosts=4), schema.RunSection(steps=8)
    expected = dataclasses.replace(schema.Config(), world=world, run=run)
    assert load.load(path, ["steps=7", "steps=8"]) == expected
    write(tmp_path / "base.yml", "steps: 5\nhosts: 3\nlog_period: 2\n")
    run = dataclasses.replace(run, log_period=2)
    expected = dataclasses.replace(expected, run=run)
    assert load.load(path, ["steps=7", "steps=8"]) == expected
    with pytest.raises(errors.ConfigError, match=r"a\.yml"):
        load.load(write(tmp_path / "a.yml", "steps: ["))


def test_what_the_command_line_gives_may_be_empty_or_no_yaml():
    settings = load.settings(None, ["a=", "b=[x", "c=1"])
    found = {key: each.value for key, each in settings.items()}
    assert found == {"a": "", "b": "[x", "c": 1}


def test_no_two_sections_have_the_same_key():
    assert len(load.keys()) == sum(len(vars(s)) for s in vars(schema.Config()).values())


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learning_rate", "1e-3", 1e-3),
        ("learning_rate", "1.e-3", 1e-3),
        # As MaxText writes them.
        ("eval_interval", "-1", 0),
        ("eval_steps", "-1", 0),
        ("max_segments_per_seq", "-1", 0),
        ("train_data_columns", "['body']", "body"),
        ("train_data_columns", "['a', 'b']", "a,b"),
        # Which YAML takes for false.
        ("divergence_action", "off", "off"),
        ("divergence_action", "no", "off"),
        ("divergence_action", '"off"', "off"),
    ],
)
def test_values_are_read_as_people_write_them(tmp_path, key, text, value):
    path = write(tmp_path / "a.yml", "")
    in_file = write(tmp_path / "b.yml", f"{key}: {text}\n")
    default = load.values(schema.Config())
    for config in (load.load(path, [f"{key}={text}"]), load.load(in_file)):
        assert load.values(config) == default | {key: value or default[key]}
        assert load.from_values(load.values(config), place="here") == config


# Checkpoints.


def tiers(**keys):
    config = refusals.read(refusals.TIERS | keys)
    return configured.tiers(config, persistent="/steps")


def test_keys_of_maxtext_make_three_tiers(monkeypatch):
    monkeypatch.delenv("POD_IP", raising=False)
    local = Local("/ram/first", every=5, limit_bytes=64 * 2**30)
    assert tiers() == [local, Peers(), Persistent("/steps", every_minutes=20.0)]
    policies = ocp.training.preservation_policies
    found = tiers(
        multi_tier_checkpointing_backup_interval_minutes=0.0,
        multi_tier_checkpointing_backup_interval_steps=100,
        max_num_checkpoints_to_keep=3,
        peer_copies=1,
        peer_assume_data_parallelism=True,
        peer_domain="rack",
        peer_domains="rack=r7;zone=z",
        peer_port=8090,
        peer_urls="https://10.0.0.1:1/v1/r;https://10.0.0.2:1/v1/r",
        peer_backup_urls="https://10.0.0.3:1/v1/r",
        peer_secret_file="s",
        peer_timeout_secs=7.0,
        peer_max_mib_per_sec=2.5,
        peer_interface="10.1.1.1",
        peer_tls_certificate="c",
        peer_tls_key="k",
        peer_tls_ca="a",
    )
    peers = Peers(
        copies=1,
        assume_data_parallelism=True,
        domain="rack",
        domains={"rack": "r7", "zone": "z"},
        port=8090,
        known=("https://10.0.0.1:1/v1/r", "https://10.0.0.2:1/v1/r"),
        backups=("https://10.0.0.3:1/v1/r",),
        secret_file="s",
        timeout_secs=7.0,
        max_bytes_per_sec=2.5 * 2**20,
        interface="10.1.1.1",
        tls=TlsFiles(certificate="c", key="k", authority="a"),
    )
    keep = policies.AnyPreservationPolicy([policies.LatestN(3)])
    assert found == [local, peers, Persistent("/steps", every=100, keep=keep)]


@pytest.mark.parametrize(
    ("quantity", "num_bytes"),
    [("1", 1), ("3K", 3000), ("3Ki", 3072), ("512Mi", 2**29), ("2Ti", 2**41)],
)
def test_amount_of_memory_is_read_as_kubernetes_reads_it(quantity, num_bytes):
    section = schema.TiersSection(local_checkpoint_size_limit=quantity)
    read = configured.num_bytes(section, "local_checkpoint_size_limit")
    assert read == num_bytes


# Machines, slices and hosts.


@pytest.mark.parametrize(
    ("machine", "environment", "slices"),
    [
        (1, {}, range(2, 4)),
        # That of its launcher unless it is set.
        (-1, {"NODE_RANK": "1", "SLURM_NODEID": "0"}, range(2, 4)),
        (-1, {"JOB_COMPLETION_INDEX": "1"}, range(2, 4)),
        (0, {"NODE_RANK": "1", "SLURM_NODEID": "0"}, range(2)),
    ],
)
def test_slices_are_dealt_to_the_machines_in_order(machine, environment, slices):
    keys = {"elastic_machine": machine, "peer_interface": "10.0.0.2"}
    config = refusals.read(refusals.MACHINES | keys)
    own = launch.place(config, environment)
    assert (own.interface, own.slices) == ("10.0.0.2", slices)


def test_devices_of_one_process_stand_for_slices_if_the_run_is_elastic():
    simulated = {"hosts": 1, "slices": 4, "elastic_enabled": True}
    assert configured.is_simulated(refusals.read(simulated))
    for change in (
        {"elastic_enabled": False},
        {"hosts": 4},
        {"slices": 1},
        {"hardware": "gpu"},
        {"enable_single_controller": True},
    ):
        assert not configured.is_simulated(refusals.read(simulated | change))


def test_a_run_that_is_not_elastic_trains_on_all_of_its_slices_or_ends():
    # Hosts that get SIGTERM before their supervisor are no slice to go on without.
    world = {"hosts": 2, "slices": 2, "elastic_min_slice_count": 1}
    for is_elastic, least in ((True, 1), (False, 2)):
        config = refusals.read(world | {"elastic_enabled": is_elastic})
        chosen = configured.policy(config, configured.groups(config))
        assert chosen.min_slices == least


@pytest.mark.parametrize("hardware", ["gpu", "tpu"])
def test_supervisor_of_an_accelerator_leaves_the_devices_to_its_host(hardware):
    alone = {"elastic_enabled": True, "per_device_batch_size": 0.5}
    config = refusals.read(alone | {"hardware": hardware})
    configured.check_local(config)
    # It does not know their number, which the rows of a batch depend on.
    groups = configured.groups(config)
    decided = decision.decide(
        decision.Slices(alive_secs={0: 99.0}),
        configured.policy(config, groups),
        configured.work(config, groups),
    )
    assert isinstance(decided, decision.Train)
    assert (decided.slices, decided.accumulated) == ((0,), 1)
    assert config.world.gpus(0) is None


@pytest.mark.parametrize(
    ("slices", "slots"),
    [((0, 1, 2), [0, 1, 2, 3, 4, 5]), ((0, 2), [0, 1, 4, 5]), ((4,), [2, 3])],
)
def test_host_has_the_same_devices_in_all_worlds(monkeypatch, slices, slots):
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.setattr(host, "joined", mock.Mock(side_effect=InterruptedError))
    monkeypatch.setenv(documents.LOCAL_HOSTS_VARIABLE, "")
    hardware = schema.WorldSection(hardware="gpu", devices_per_host=4, hosts=6)
    # One alone has all.
    host.configure(hardware)
    assert "jax_cuda_visible_devices" not in updates
    work = decision.Train(slices=slices, spares=(), rows=0, accumulated=1)
    world = cluster.Assignment(number=1, work=work)
    owned = host.Owned(memory=None, kept=None, most_hosts=6)
    for number, slot in enumerate(slots):
        member = host.Member(address="", num_hosts=len(slots), host=number)
        with pytest.raises(InterruptedError):
            host.run_host(None, hardware, world, owned, member, mock.Mock())
        assert updates["jax_platforms"] == "cuda,cpu"
        gpus = ",".join(str(4 * slot + n) for n in range(4))
        assert updates["jax_cuda_visible_devices"] == gpus


# Batches.

WORLD = topology.Topology(hosts=4, slices=2, devices=8)
RAMP = {
    "enable_rampup_batch_size": True,
    "per_device_batch_size": 6.0,
    "per_device_batch_size_start": 2.0,
    "per_device_batch_size_increment": 2.0,
    "global_rampup_samples": 96,
}
SHARDS = {"global_batch_size": 16, "num_logical_shards": 6}


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        # A global size holds on any world; that of a device grows with it.
        ({"global_batch_size": 16, "per_device_batch_size": 5.0}, [16] * 8),
        ({"per_device_batch_size": 3.0}, [24] * 8),
        # 48 rows by 16, 48 by 32 (to the nearest whole step), then the final size.
        (RAMP, [16, 16, 16, 32, 32, 48, 48, 48]),
        (RAMP | {"num_logical_shards": 12}, [16, 16, 16, 32, 32, 48, 48, 48]),
        (SHARDS | {"max_shard_reads": 2.0}, [16] * 8),
        (SHARDS | {"num_logical_shards": 8}, [16] * 8),
        (SHARDS, r"=6 and .* 16 rows, 4 hosts .* 2 times; .*=8, .* multiple of 4 or"),
        (
            RAMP | {"num_logical_shards": 50, "max_shard_reads": 2.0},
            "number of hosts, 4, does not divide num_logical_shards=50",
        ),
        ({"per_device_batch_size": 0.3}, "8 devices gives a global batch of 2.4 rows"),
        ({"global_batch_size": 12}, "12 rows cannot be divided evenly among 8 devices"),
    ],
)
def test_each_step_has_the_rows_of_its_stage_which_devices_divide(keys, sizes):
    data = data_keys.DataKeys(**keys)
    if isinstance(sizes, list):
        stages = batch_size.schedule(data, WORLD)
        assert [batch_size.at(stages, step) for step in range(8)] == sizes
        return
    with pytest.raises(errors.ConfigError, match=sizes):
        batch_size.schedule(data, WORLD)
