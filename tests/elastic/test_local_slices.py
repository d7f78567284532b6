"""The agents that the supervisor of a machine starts, and those of other machines."""

import contextlib

import pytest
import trustme

from elastic_ckpt.elastic import local_slices
from elastic_ckpt.tiers.peers import known_agents
from elastic_ckpt.training import configured, load
from tests import runs, shared_memory


@pytest.fixture
def slices(tmp_path):
    """Starts the agents of two slices, as a configuration with some settings has it."""

    def start(**settings):
        path = runs.write_config(
            tmp_path,
            str(tmp_path / "corpus"),
            hosts=2,
            slices=2,
            elastic_enabled=True,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            **settings,
        )
        config = load.load(path)
        started = local_slices.LocalSlices(
            config.world,
            log_directory=str(tmp_path / "logs"),
            memory=configured.memory(config),
            limits=configured.limits(config),
        )
        return resources.enter_context(contextlib.closing(started))

    with shared_memory.directory("slices") as ram, contextlib.ExitStack() as resources:
        yield start


@pytest.mark.slow
def test_the_agents_encrypt_if_the_run_does(slices, tmp_path):
    issued = trustme.CA().issue_cert("127.0.0.1")
    own = tmp_path / "host.pem"
    issued.private_key_and_cert_chain_pem.write_to_path(own)
    started = slices(peer_tls_certificate=str(own), peer_tls_key=str(own))
    assert [url.partition(":")[0] for url in started.agents] == ["https", "https"]


@pytest.mark.slow
def test_an_agent_that_is_gone_is_not_remembered_by_any_slice(slices):
    started = slices()
    memory = started._owned.memory
    roots = [memory.root(number) for number in range(2)]
    gone, left = (
        {"url": f"http://10.0.0.{number}:1", "seen": 1.0, "certificate_sha256": None}
        for number in range(2)
    )
    for root in roots:
        known_agents.write(root, {"a": gone, "b": left})
    started.forget([gone["url"]])
    assert [known_agents.read(root) for root in roots] == [{"b": left}] * 2
