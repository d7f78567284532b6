"""Failure domains in words, and those of a host's environment in its manifests."""

import jax.numpy as jnp
import pytest

from elastic_ckpt.checkpoint import factory
from elastic_ckpt.core import errors
from elastic_ckpt.manifests import failure_domains
from elastic_ckpt.tiers.choices import Local, Peers
from elastic_ckpt.tiers.ram import ram_disk


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("rack=r7", {"rack": "r7"}),
        ("rack=r7;zone=us-east5-a;", {"rack": "r7", "zone": "us-east5-a"}),
        # A label that the node does not have.
        ("zone=;rack=r=7", {"rack": "r=7"}),
    ],
)
def test_pairs_are_read(text, expected):
    assert failure_domains.parse(text, what="x") == expected


@pytest.mark.parametrize("text", ["rack", "=r7", "rack=r7;zone"])
def test_what_is_no_pair_is_named(text):
    with pytest.raises(errors.ConfigError, match=r"x='.*' is not `kind=name`"):
        failure_domains.parse(text, what="x")


def saved(tmp_path, **peers):
    """The domains of the host in the manifest of a step that it saved."""
    tiers = [Local(tmp_path), Peers(**peers)]
    with factory.Checkpointer(tiers, run="run", slice_name="s1") as checkpointer:
        checkpointer.save(1, {"w": jnp.zeros(3)})
    (offer,) = ram_disk.RamDisk(tmp_path, run="run").offers(1).sources
    return dict(offer.host.domains)


def test_a_host_is_in_the_domains_of_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(failure_domains.VARIABLE, "zone=z1;rack=r1")
    host = saved(tmp_path, domains={"rack": "r2"})
    assert host.pop("host")
    # The program's own values win.
    assert host == {"slice": "s1", "zone": "z1", "rack": "r2"}


def test_an_environment_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(failure_domains.VARIABLE, "z1")
    with pytest.raises(errors.CheckpointError, match="ELASTIC_CKPT_DOMAINS='z1'"):
        saved(tmp_path)
