import functools

import pytest
from elastic_ckpt_sidecar import RemoteIterator

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import compatibility, sharded_data
from tests import pipelines


def sharded(name="plain", num_shards=12):
    make_shard = functools.partial(pipelines.ALL[name], num_shards=num_shards)
    return sharded_data.sharded(make_shard, num_shards=num_shards, pipeline=name)


def facts_of(host, **changed):
    return {
        **compatibility.local_facts(sharded()),
        compatibility.HOST: f"host {host} (node-{host})",
        **changed,
    }


def complaint(facts):
    with pytest.raises(errors.ConfigError) as raised:
        compatibility.check(facts)
    return str(raised.value)


@pytest.mark.parametrize("name", ["elastic-ckpt", compatibility.PIPELINE])
def test_of_every_fact_that_differs_it_says_which_host_has_what(name):
    facts = [facts_of(0), facts_of(1), facts_of(2, **{name: "0.0"})]
    assert complaint(facts) == (
        f"the hosts of this run differ: {name} is {facts[0][name]} on host 0"
        " (node-0), host 1 (node-1), 0.0 on host 2 (node-2). Install the same versions"
        " on every host and in the sidecar's image; if the pipeline differs, give every"
        " host the same configuration and files"
    )
    # What a host has not said is not compared.
    del facts[2][name]
    compatibility.check(facts)


def test_of_many_hosts_a_few_are_named_and_each_once():
    of_devices = [facts_of(host, jax="1") for host in range(20) for _ in range(2)]
    reported = complaint([*of_devices, facts_of(20, jax="2")])
    few = ", ".join(f"host {host} (node-{host})" for host in range(4))
    assert f"jax is 1 on {few} and 16 more, 2 on host 20 (node-20)." in reported


def test_the_fingerprint_is_that_of_what_decides_which_example_comes_when(data):
    assert compatibility.fingerprint(sharded()) == compatibility.fingerprint(sharded())
    others = [sharded(), sharded("filtered"), sharded(num_shards=6), data]
    prints = list(map(compatibility.fingerprint, others))
    assert len(set(prints)) == 4
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in prints)


def test_a_worker_of_another_version_is_refused_and_both_are_named(monkeypatch):
    of_host = compatibility.local_facts

    def found(data=None, *, role=""):
        """The worker, and not the head, finds another version on its host."""
        facts = of_host(data, role=role)
        return facts if role else {**facts, "jaxlib": "0.0.1"}

    monkeypatch.setattr(compatibility, "local_facts", found)
    own = compatibility.local_facts(role="the head")
    with pytest.raises(errors.ConfigError) as raised:
        RemoteIterator(
            sharded(), mesh=topology.mesh_of(topology.present(2)), global_batch_size=16
        )
    head, host = own[compatibility.HOST], compatibility.host_name()
    said = f"jaxlib is {own['jaxlib']} on {head}, 0.0.1 on {host}."
    assert said in str(raised.value)
