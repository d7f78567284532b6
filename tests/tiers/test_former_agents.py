"""Agents and programs of the version before are understood, and understand these.

`agent_v2.tar.xz` has the modules of that version which an agent and its clients import,
as they were before agents of machines, nodes and backup hosts became one.
"""

import contextlib
import json
import pathlib
import subprocess
import sys
import tarfile

import pytest

from elastic_ckpt.tiers.peers import (
    agent,
    agent_process,
    node_record,
    peer,
    peer_client,
    secret,
)
from elastic_ckpt.tiers.ram import machine
from tests.tiers import served, served_nodes

ARCHIVE = pathlib.Path(__file__).parents[1] / "golden" / "agent_v2.tar.xz"
FILES = {"data/part": bytes(range(256)) * 2**12}
# A program that reads, repairs, and prints what it has read.
CLIENT = """
import contextlib, json, sys
from elastic_ckpt.tiers.peers import peer, peer_client
url, known, run = sys.argv[1:]
with contextlib.closing(peer_client.PeerClient(known)) as client:
    tier = peer.Peer(url, client, run)
    ((offer, source),) = tier.offers(30).sources.items()
    (file,) = offer.manifest.component_files
    into = bytearray(file.stored_bytes)
    source.put_right(file.path, bytes(range(256)) * 2**12)
    source.read_into(file.path, 0, memoryview(into))
    known_machine = client.endpoint(url).read("/v1/machine", most_bytes=4096)
    print(json.dumps([offer.host.id, into.hex(), json.loads(known_machine)["version"]]))
"""
# A program that attaches to the agent of its node, and asks it for memory.
ATTACHING = """
import sys
from elastic_ckpt.tiers.peers import agent, agent_process
service = agent.Service(root=sys.argv[1])
print(agent_process.AgentProcess(service, most_bytes=2**20).address.url)
"""


@pytest.fixture(scope="module")
def former(tmp_path_factory):
    """The directory of a program of the version before."""
    directory = tmp_path_factory.mktemp("former")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, filter="data")
    return directory


@pytest.fixture
def root(tmp_path):
    """The RAM disk of a machine, with a bad copy."""
    root = tmp_path / "run"
    directory = served.save(root, 30, FILES)
    (root / machine.FILE).write_text(served.MACHINE)
    (directory / "data/part").write_bytes(b"damaged")
    return root


def run(program, *arguments, cwd):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    ended = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_what_is_tested_is_another_program(former):
    program = "import elastic_ckpt.tiers.peers.memory_request as m; print(m.__file__)"
    assert run(program, cwd=former).startswith(str(former))


def test_a_former_program_reads_from_an_agent_and_repairs_its_copies(former, root):
    with served.serving(agent.Service(root=str(root))) as address:
        known = secret.read_or_create(root)
        read = run(CLIENT, address.url, known, served.RUN, cwd=former)
    host, content, version = json.loads(read)
    assert host == f"{served.MACHINE}.0"
    assert bytes.fromhex(content) == FILES["data/part"]
    assert version == 2


def test_a_former_agent_is_read_and_repairs_its_copies(former, root):
    with served.agent_process(root, cwd=former) as (_, url):
        assert agent.find(root).url == url
        client = peer_client.PeerClient(secret.read_or_create(root))
        with contextlib.closing(client):
            tier = peer.Peer(url, client, served.RUN)
            ((offer, source),) = tier.offers(30).sources.items()
            assert offer.host.id == f"{served.MACHINE}.0"
            source.put_right("data/part", FILES["data/part"])
            into = bytearray(len(FILES["data/part"]))
            source.read_into("data/part", 0, memoryview(into))
            assert into == FILES["data/part"]
            assert source.size("data/part") == len(into)


def test_a_former_program_attaches_to_the_agent_of_its_node(former, tmp_path, root):
    with served_nodes.serving(tmp_path):
        url = run(ATTACHING, root, cwd=former).strip()
        assert url == agent.wait_for(root).url
        assert node_record.find(root).answers["run"].refusal == ""


@pytest.mark.slow
def test_a_program_attaches_to_a_former_agent_of_its_node_and_to_the_one_after_it(
    former, tmp_path, root
):
    urls = []
    service = agent.Service(root=str(root))
    for serving in (
        served.agent_process(tmp_path, "--node", cwd=former),
        served_nodes.serving(tmp_path),
    ):
        with (
            serving,
            contextlib.closing(
                agent_process.AgentProcess(service, most_bytes=2**20)
            ) as attached,
        ):
            urls.append(attached.address.url)
            assert served.ask(urls[-1], "/v1/steps", secret.read(secret.path(root)))
    # Others reach it where it was.
    assert urls[0] == urls[1]
