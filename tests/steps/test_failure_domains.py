"""Failure domains in words, and those of a host's environment in its manifests."""

import jax.numpy as jnp
import pytest

from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest, owners
from elastic_ckpt.tiers.choices import Local, Peers
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.training import schema


def test_pairs_are_read():
    for text, expected in (
        ("", {}),
        ("rack=r7;zone=us-east5-a;", {"rack": "r7", "zone": "us-east5-a"}),
        # A label that the node does not have.
        ("zone=;rack=r=7", {"rack": "r=7"}),
    ):
        assert owners.parse_domains(text, what="x") == expected


def saved(tmp_path, **peers):
    """The domains of the host in the manifest of a step that it saved."""
    tiers = [Local(tmp_path), Peers(**peers)]
    with frontend.Checkpointer(tiers, run="run", slice_name="s1") as checkpointer:
        checkpointer.save(1, {"w": jnp.zeros(3)})
    (copy,) = ram_disk.RamDisk(tmp_path, run="run").offers(1).copies
    return dict(copy.manifest.host.domains)


def test_a_host_is_in_the_domains_of_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(owners.DOMAINS_VARIABLE, "zone=z1;rack=r1")
    host = saved(tmp_path, domains={"rack": "r2"})
    assert host.pop("host")
    # The program's own values win.
    assert host == {"slice": "s1", "zone": "z1", "rack": "r2"}
    monkeypatch.setenv(owners.DOMAINS_VARIABLE, "z1")
    with pytest.raises(errors.CheckpointError, match="ELASTIC_CKPT_DOMAINS='z1'"):
        saved(tmp_path)


def world(*domains):
    """A world of hosts, each in some domains."""
    return [
        manifest.Host(
            id=f"{number:016x}.0",
            number=number,
            domains=owners.parse_domains(each, what="x"),
        )
        for number, each in enumerate(domains)
    ]


@pytest.mark.parametrize(
    ("domains", "kind", "inner"),
    [
        # One zone and one block: slices count.
        (["zone=z;block=b;slice=0", "zone=z;block=b;slice=1"], "slice", ""),
        # The largest kind that parts the hosts, and within it the smallest.
        (["zone=z;block=b;slice=0", "zone=z;block=c;slice=1"], "block", "slice"),
        (["zone=y;block=b;slice=0", "zone=z;block=c;slice=1"], "zone", "slice"),
        (["rack=b;slice=0", "rack=c;slice=0"], "rack", "slice"),
        # Without a label of one host there is no guarantee.
        (["zone=y;slice=0", "slice=1"], "slice", ""),
        (["block=b;slice=0", "block=c"], "block", ""),
        # One host outside could not take the copies of all others.
        (["zone=y;slice=0"] * 3 + ["zone=z;slice=1"], "slice", ""),
        (["zone=y;slice=0"] * 3 + ["zone=z;slice=1"] * 2, "zone", "slice"),
        (["rack=r"], "slice", ""),
    ],
)
def test_the_largest_kind_counts_among_which_hosts_are_spread_evenly(
    domains, kind, inner
):
    hosts, kinds = world(*domains), owners.DEFAULT_DOMAIN
    assert owners.domain_kinds(hosts, kinds) == (kind, inner)
    # A kind that is named alone counts always.
    assert owners.domain_kinds(hosts, "rack") == ("rack", "")


def test_the_default_of_the_configuration_is_that_of_the_tier():
    assert schema.TiersSection().peer_domain == Peers().domain
