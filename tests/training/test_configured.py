"""What a configuration asks for, in the plain values of the library."""

import dataclasses

import jax
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.elastic import cluster, decision, host
from elastic_ckpt.tiers.choices import Local, Peers, Persistent, TlsFiles
from elastic_ckpt.training import configured, launch, load, schema
from tests.refusals import training as refusals


def tiers(**keys):
    config = refusals.read(refusals.TIERS | keys)
    return configured.tiers(config, persistent="/steps")


def test_maxtexts_keys_make_three_tiers(monkeypatch):
    monkeypatch.delenv("POD_IP", raising=False)
    assert tiers() == [
        Local("/ram/first", every=5, limit_bytes=64 * 2**30),
        Peers(),
        Persistent("/steps", every_minutes=20.0),
    ]


def test_backups_go_by_steps_and_keep_the_newest():
    *_, persistent = tiers(
        multi_tier_checkpointing_backup_interval_minutes=0.0,
        multi_tier_checkpointing_backup_interval_steps=100,
        max_num_checkpoints_to_keep=3,
    )
    assert (persistent.every, persistent.every_minutes) == (100, None)
    policies = ocp.training.preservation_policies
    assert persistent.keep == policies.AnyPreservationPolicy([policies.LatestN(3)])


def test_peers_have_the_failure_domains_and_limits_of_the_configuration():
    _, peers, _ = tiers(
        peer_copies=1,
        peer_assume_data_parallelism=True,
        peer_domain="rack",
        peer_domains="rack=r7;zone=z",
        peer_port=8090,
        peer_urls="https://10.0.0.1:1/v1/r;https://10.0.0.2:1/v1/r",
        peer_max_mib_per_sec=2.5,
        peer_interface="10.1.1.1",
        peer_tls_certificate="c",
        peer_tls_key="k",
        peer_tls_ca="a",
    )
    assert peers == Peers(
        copies=1,
        assume_data_parallelism=True,
        domain="rack",
        domains={"rack": "r7", "zone": "z"},
        port=8090,
        known=("https://10.0.0.1:1/v1/r", "https://10.0.0.2:1/v1/r"),
        max_bytes_per_sec=2.5 * 2**20,
        interface="10.1.1.1",
        tls=TlsFiles(certificate="c", key="k", authority="a"),
    )


@pytest.mark.parametrize(
    ("quantity", "num_bytes"),
    [("1", 1), ("3K", 3000), ("3Ki", 3072), ("512Mi", 2**29), ("2Ti", 2**41)],
)
def test_amount_of_memory_is_read_as_kubernetes_reads_it(quantity, num_bytes):
    section = schema.TiersSection(local_checkpoint_size_limit=quantity)
    read = configured.num_bytes(section, "local_checkpoint_size_limit")
    assert read == num_bytes


def place(environment=None, **keys):
    config = load.from_values(refusals.MACHINES | keys, place="here")
    return launch.place(config, environment or {})


def test_slices_are_dealt_to_the_machines_in_order():
    own = place(elastic_machine=1, peer_interface="10.0.0.2")
    assert (own.interface, own.slices) == ("10.0.0.2", range(2, 4))


def test_number_of_a_machine_is_that_of_its_launcher_unless_it_is_set():
    environment = {"NODE_RANK": "1", "SLURM_NODEID": "0"}
    second = range(2, 4)
    assert place(environment, elastic_machine=-1).slices == second
    assert place({"JOB_COMPLETION_INDEX": "1"}, elastic_machine=-1).slices == second
    assert place(environment, elastic_machine=0).slices == range(2)


def test_devices_of_one_process_stand_for_slices_if_the_run_is_elastic():
    simulated = {"hosts": 1, "slices": 4, "elastic_enabled": True}
    assert configured.is_simulated(refusals.read(simulated))
    for change in (
        {"elastic_enabled": False},
        {"hosts": 4},
        {"slices": 1},
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


def test_hosts_of_a_machine_see_different_gpus(monkeypatch):
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    alone = schema.WorldSection(hardware="gpu", devices_per_host=4)
    hardware = dataclasses.replace(alone, hosts=4)
    host.configure(hardware)
    host.configure(alone, slot=0)
    assert "jax_cuda_visible_devices" not in updates
    host.configure(hardware, slot=2)
    assert updates["jax_platforms"] == "cuda,cpu"
    assert updates["jax_cuda_visible_devices"] == "8,9,10,11"


@pytest.mark.parametrize(
    ("slices", "slots"),
    [((0, 1, 2), [0, 1, 2, 3, 4, 5]), ((0, 2), [0, 1, 4, 5]), ((4,), [2, 3])],
)
def test_host_has_the_same_devices_in_all_worlds(monkeypatch, slices, slots):
    def configure(_, *, slot):
        raise KeyError(slot)

    monkeypatch.setattr(host, "configure", configure)
    work = decision.Train(slices=slices, spares=(), rows=0, accumulated=1)
    world = cluster.Assignment(number=1, work=work)
    owned = host.Owned(memory=None, kept=None, most_hosts=6)
    for number, slot in enumerate(slots):
        member = host.Member(address="", num_hosts=len(slots), host=number)
        with pytest.raises(KeyError, match=str(slot)):
            host.run_host(None, host.Hardware(), world, owned, member, None)
