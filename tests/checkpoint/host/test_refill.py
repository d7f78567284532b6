"""A machine that holds no step of its run is filled from its peers, by placement."""

import contextlib
import pathlib

import pytest

from elastic_ckpt.checkpoint.host import refill
from elastic_ckpt.steps import manifest, placement
from elastic_ckpt.tiers.peers import agent, known_agents, secret, world_record
from elastic_ckpt.tiers.ram import machine, ram_disk
from tests.tiers import served, tiered_steps

STEP = 3


@pytest.fixture
def peer(tmp_path):
    """The RAM disk of a machine with a step."""
    root = tmp_path / "peer"
    with tiered_steps.checkpointer(root) as opened:
        tiered_steps.save(opened, STEP - 1, STEP)
    return ram_disk.RamDisk(root, run=tiered_steps.RUN)


@pytest.fixture
def disk(tmp_path):
    """The RAM disk of a machine that was replaced."""
    disk = ram_disk.RamDisk(tmp_path / "replaced", run=tiered_steps.RUN)
    assert machine.machine_id(disk.root)
    return disk


def join(disk, peer, url):
    """Has both machines be in a new world, as far as the agent of a node sees it."""
    secret.adopt(disk.root, secret.read_or_create(peer.root))
    known = {"url": url, "seen": 1, "certificate_sha256": None}
    known_agents.write(disk.root, {peer.machine: known})
    hosts = tuple(
        manifest.Host(
            id=each.host_id(0),
            number=number,
            domains={"host": each.machine, "slice": str(number)},
        )
        for number, each in enumerate((peer, disk))
    )
    world_record.write(
        disk.root,
        world_record.WorldRecord(
            run=tiered_steps.RUN,
            hosts=hosts,
            policy=placement.Policy(copies=1),
            limit_bytes=None,
        ),
    )


@contextlib.contextmanager
def serving(peer):
    with served.serving(agent.Service(root=str(peer.root))) as address:
        yield address.url


def parts(disk, step):
    """The digests of all parts of a step on a machine, and its files of chunks."""
    ((offer, files),) = disk.offers(step).sources.items()
    held = offer.manifest
    rows = [
        held.fragments.row(number, contents=held.contents)
        for number in range(len(held.fragments))
    ]
    digests = {(each.leaf, each.box): each.digest for each in rows}
    digests |= {each.path: each.digest for each in held.component_files}
    content = {
        path.relative_to(files.directory): path.read_bytes()
        for path in pathlib.Path(files.directory).rglob("*")
        if path.is_file() and not path.name.startswith("manifest-")
    }
    return digests, content


def test_a_machine_without_a_step_gets_all_parts_as_they_were_saved(peer, disk):
    with serving(peer) as url:
        join(disk, peer, url)
        _, taken = refill.refill(str(disk.root))
        assert not taken.problems
        assert disk.steps() == [STEP]
        assert parts(disk, STEP) == parts(peer, STEP)
        # Then nothing is left to do.
        assert refill.refill(str(disk.root)) is None
