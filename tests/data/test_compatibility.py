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
    facts = {
        **compatibility.local_facts(sharded()),
        compatibility.HOST: f"host {host} (node-{host})",
    }
    return facts | {
        name.replace("_", "-"): dataset for name, dataset in changed.items()
    }


def complaint(facts):
    with pytest.raises(errors.ConfigError) as raised:
        compatibility.check(facts)
    return str(raised.value)


def test_hosts_that_agree_pass():
    compatibility.check([facts_of(host) for host in range(5)])


@pytest.mark.parametrize("name", ["elastic_ckpt", "pipeline"])
def test_of_every_fact_that_differs_it_says_which_host_has_what(name):
    own = facts_of(0)[name.replace("_", "-")]
    reported = complaint([facts_of(0), facts_of(1), facts_of(2, **{name: "0.0"})])
    assert reported == (
        f"the hosts of this run differ: {name.replace('_', '-')} is {own} on host 0"
        " (node-0), host 1 (node-1), 0.0 on host 2 (node-2). Install the same versions"
        " on every host and in the sidecar's image; if the pipeline differs, give every"
        " host the same configuration and files"
    )


def test_of_many_hosts_a_few_are_named_and_each_once():
    of_devices = [facts_of(host, jax="1") for host in range(20) for _ in range(2)]
    reported = complaint([*of_devices, facts_of(20, jax="2")])
    few = ", ".join(f"host {host} (node-{host})" for host in range(4))
    assert f"jax is 1 on {few} and 16 more, 2 on host 20 (node-20)." in reported


def test_what_a_host_has_not_said_is_not_compared():
    silent = dict(facts_of(1))
    del silent[compatibility.PIPELINE]
    compatibility.check([facts_of(0), silent])


def test_the_fingerprint_is_that_of_what_decides_which_example_comes_when(data):
    assert compatibility.fingerprint(sharded()) == compatibility.fingerprint(sharded())
    dataset = [sharded(), sharded("filtered"), sharded(num_shards=6)]
    prints = [compatibility.fingerprint(one) for one in (*dataset, data)]
    assert len(set(prints)) == 4
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in prints)


@pytest.fixture
def at_the_worker(monkeypatch):
    """Has the worker, and not the head, find other facts of its host."""
    of_host = compatibility.local_facts

    def find(**changed):
        def actual(data=None, *, role=""):
            facts = of_host(data, role=role)
            return facts if role else {**facts, **changed}

        monkeypatch.setattr(compatibility, "local_facts", actual)

    return find


def remote(data):
    return RemoteIterator(
        data, mesh=topology.mesh_of(topology.present(2)), global_batch_size=16
    )


def test_a_worker_of_another_version_is_refused_and_both_are_named(at_the_worker):
    name = "jaxlib"
    at_the_worker(**{name: "0.0.1"})
    own = compatibility.local_facts(role="the head")
    with pytest.raises(errors.ConfigError) as raised:
        remote(sharded())
    head, host = own[compatibility.HOST], compatibility.host_name()
    assert f"{name} is {own[name]} on {head}, 0.0.1 on {host}." in str(raised.value)
