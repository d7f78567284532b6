"""A machine that holds no step of its run is filled from its peers, by placement."""

import pathlib

from elastic_ckpt.checkpoint.host import refill
from elastic_ckpt.steps import manifest, owners
from elastic_ckpt.tiers.peers import agent, known_agents, secret, world_record
from elastic_ckpt.tiers.ram import machine, ram_disk
from tests.tiers import served, tiered_steps

STEP = 3


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


def test_a_machine_without_a_step_gets_all_parts_as_they_were_saved(tmp_path):
    with tiered_steps.checkpointer(tmp_path / "peer") as opened:
        tiered_steps.save(opened, STEP - 1, STEP)
    peer = ram_disk.RamDisk(tmp_path / "peer", run=tiered_steps.RUN)
    replaced = ram_disk.RamDisk(tmp_path / "replaced", run=tiered_steps.RUN)
    assert machine.machine_id(replaced.root)
    secret.adopt(replaced.root, secret.read_or_create(peer.root))
    hosts = tuple(
        manifest.Host(
            id=each.host_id(0),
            number=number,
            domains={"host": each.machine, "slice": str(number)},
        )
        for number, each in enumerate((peer, replaced))
    )
    world = world_record.WorldRecord(
        run=tiered_steps.RUN,
        hosts=hosts,
        policy=owners.Policy(copies=1),
        limit_bytes=None,
    )
    world_record.write(replaced.root, world)
    with served.serving(agent.Service(root=str(peer.root))) as address:
        known = {"url": address.url, "seen": 1, "certificate_sha256": None}
        known_agents.write(replaced.root, {peer.machine: known})
        _, taken = refill.refill(str(replaced.root))
        assert not taken.problems
        assert replaced.steps() == [STEP]
        assert parts(replaced, STEP) == parts(peer, STEP)
        # Then nothing is left to do.
        assert refill.refill(str(replaced.root)) is None
