import re
import types

import pytest
from elastic_ckpt_sidecar import RemoteIterator

import elastic_ckpt as ec
from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import compatibility
from tests.pipelines import sharded


@pytest.mark.parametrize(
    "name",
    [
        *("elastic-ckpt", compatibility.PIPELINE),
        *("tokenizers", "sentencepiece", "tiktoken", "jinja2", "pyarrow"),
    ],
)
def test_of_every_fact_that_differs_it_says_which_hosts_have_what(name):
    of_host = compatibility.local_facts(sharded("plain"))
    # A host says it for each of its devices.
    facts = [
        {**of_host, compatibility.HOST: f"host {number} (node)"}
        for number in range(20)
        for _ in range(2)
    ]
    facts[-1] |= {name: "0.0", compatibility.HOST: "host 20 (node)"}
    few = ", ".join(f"host {number} (node)" for number in range(5))
    with pytest.raises(errors.ConfigError) as raised:
        compatibility.check(facts)
    assert str(raised.value) == (
        f"the hosts of this run differ: {name} is {of_host[name]} on {few}, ..., 0.0 on"
        " host 20 (node). Install the same versions on every host and in the sidecar's"
        " image; if anything else differs, use the same arguments, configuration and"
        " files on every host"
    )
    # What a host has not said is not compared.
    del facts[-1][name]
    compatibility.check(facts)


def test_the_pipeline_is_told_by_what_decides_which_example_comes_when(data):
    def told(*others):
        facts = map(compatibility.local_facts, others)
        return {each[compatibility.PIPELINE] for each in facts}

    assert len(told(sharded("plain"), sharded("plain"))) == 1
    others = sharded("filtered"), sharded("plain", num_shards=6), data
    assert len(told(sharded("plain"), *others)) == 4


def test_a_worker_of_another_version_is_refused_and_both_are_named(monkeypatch):
    of_host = compatibility.local_facts

    def found(data=None, *, role=""):
        """The worker, and not the head, finds another version on its host."""
        facts = of_host(data, role=role)
        return facts if role else {**facts, "jaxlib": "0.0.1"}

    monkeypatch.setattr(compatibility, "local_facts", found)
    own = compatibility.local_facts(role="the head")
    head, host = own[compatibility.HOST], compatibility.host_name()
    said = f"jaxlib is {own['jaxlib']} on {head}, 0.0.1 on {host}."
    mesh = topology.mesh_of(topology.present(2))
    with pytest.raises(errors.ConfigError, match=re.escape(said)):
        RemoteIterator(sharded("plain"), mesh=mesh, global_batch_size=16)


def test_a_controller_of_another_version_is_refused(monkeypatch):
    def gather(kind, facts, **_):
        other = {**facts, "grain": "0.0.1", compatibility.HOST: f"another ({kind})"}
        return [facts, other]

    both = types.SimpleNamespace(gather=gather)
    monkeypatch.setattr(compatibility.allgather, "shared", lambda _: both)
    mesh = topology.mesh_of(topology.present(2))
    with pytest.raises(errors.ConfigError, match=r"grain is .*, 0\.0\.1 on another"):
        ec.batches(sharded("plain"), mesh=mesh, global_batch_size=16)
