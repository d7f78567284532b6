"""Tiers as a configuration asks for them."""

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.application import configured
from elastic_ckpt.config import load
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.choices import Local, Peers, Persistent, TlsFiles

KEYS = {
    "run_name": "first",
    "enable_multi_tier_checkpointing": True,
    "local_checkpoint_directory": "/ram",
    "local_checkpoint_period": 5,
    "multi_tier_checkpointing_backup_interval_minutes": 20.0,
}


def tiers(**keys):
    config = load.from_values({**KEYS, **keys}, place="here")
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
    assert persistent.keep == ocp.training.preservation_policies.LatestN(3)


def test_peers_have_the_failure_domains_and_limits_of_the_configuration():
    _, peers, _ = tiers(
        peer_copies=1,
        peer_assume_data_parallelism=True,
        peer_domain="rack",
        peer_domains="rack=r7;zone=z",
        peer_port=8090,
        peer_urls="https://10.0.0.1:1;https://10.0.0.2:1",
        peer_max_mib_per_sec=2.5,
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
        known=("https://10.0.0.1:1", "https://10.0.0.2:1"),
        max_bytes_per_sec=2.5 * 2**20,
        tls=TlsFiles(certificate="c", key="k", authority="a"),
    )
    assert tiers(peer_interface="10.1.1.1")[1].interface == "10.1.1.1"


def test_a_malformed_url_of_an_agent_is_named_with_its_key():
    with pytest.raises(
        errors.ConfigError, match=r"peer_urls has '10\.0\.0\.1:1', which"
    ):
        tiers(peer_urls="http://10.0.0.2:1;10.0.0.1:1")


@pytest.mark.parametrize(
    ("quantity", "num_bytes"),
    [("1", 1), ("3K", 3000), ("3Ki", 3072), ("512Mi", 2**29), ("2Ti", 2**41)],
)
def test_an_amount_of_memory_is_read_as_kubernetes_reads_it(quantity, num_bytes):
    assert configured.num_bytes(quantity) == num_bytes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"local_checkpoint_period": 0}, "local_checkpoint_period=0: both are needed"),
        ({"local_checkpoint_directory": ""}, "local_checkpoint_directory='' and"),
        (
            {"multi_tier_checkpointing_backup_interval_minutes": 0.0},
            "set either .*_minutes or .*_steps, not neither",
        ),
        (
            {"multi_tier_checkpointing_backup_interval_steps": 5},
            "set either .*_minutes or .*_steps, not both",
        ),
        ({"local_checkpoint_size_limit": "64 GB"}, "is not an amount of memory"),
        ({"peer_domains": "rack"}, "peer_domains='rack': 'rack' is not `kind=name`"),
        ({"peer_tls_key": "k"}, "set all three, or none"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused(keys, message):
    with pytest.raises(errors.ConfigError, match=message):
        tiers(**keys)
