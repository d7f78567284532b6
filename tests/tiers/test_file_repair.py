"""Bad files in a RAM disk are replaced by what was saved, and by nothing else."""

import contextlib
import shutil
from concurrent import futures

import pytest

from elastic_ckpt.core import boxes, storage
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers import agent, agent_server, peer, peer_client, secret
from elastic_ckpt.tiers.ram import machine, ram_disk
from tests.tiers import served

SAVED = b"what was saved" * 1000
FILES = {"data/part": SAVED, "data/other": b"another"}


@pytest.fixture
def directory(tmp_path):
    """The directory of a step whose file is bad."""
    root = tmp_path / "root"
    made = served.save(root, 30, FILES)
    (root / machine.FILE).write_text(served.MACHINE)
    (made / "data" / "part").write_bytes(b"damaged")
    return made


@pytest.fixture
def remote(directory):
    """The same through an agent."""
    root = directory.parents[2]
    with (
        served.serving(agent.Service(root=str(root))) as address,
        contextlib.closing(
            peer_client.PeerClient(secret.read_or_create(root), timeout_secs=600)
        ) as client,
    ):
        ((_, made),) = peer.Peer(address.url, client, served.RUN).offers(30).copies
        yield made


def put_right(remote, file, content):
    leaf = served.leaf_of(file, content)
    remote.put_right(leaf, boxes.whole(leaf.shape), content)


def test_a_bad_file_is_replaced_and_one_that_is_gone_is_made(directory):
    for _ in range(2):
        ram_disk.put_right(directory, "data/part", SAVED)
        assert (directory / "data" / "part").read_bytes() == SAVED
        shutil.rmtree(directory / "data")


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("data/part", SAVED[:-1] + b"x", "its digest differs"),
        ("data/part", SAVED + b"x", "its digest differs"),
        ("data/new", SAVED, "its manifest lists no such file"),
        ("../30-0/data/part", SAVED, "its manifest lists no such file"),
    ],
)
def test_anything_else_is_refused(directory, remote, file, content, why):
    with pytest.raises(source.RepairError, match=why):
        ram_disk.put_right(directory, file, content)
    if ".." not in file:
        with pytest.raises(source.RepairError, match=why):
            put_right(remote, file, content)
    assert (directory / "data" / "part").read_bytes() == b"damaged"
    assert not (directory / "data" / "new").exists()


def test_a_repair_waits_while_a_process_removes_the_step(directory):
    slot = directory.parent
    with futures.ThreadPoolExecutor(1) as executor:
        with ram_disk.repairing(slot):
            repair = executor.submit(ram_disk.put_right, directory, "data/part", SAVED)
            assert not futures.wait([repair], timeout=0.2).done
            storage.remove(directory)
        with pytest.raises(source.RepairError, match="was not repaired"):
            repair.result()
    assert not directory.exists()


def test_a_step_that_is_gone_is_not_made_anew(directory, remote):
    next(directory.glob("manifest-*")).unlink()
    with pytest.raises(source.RepairError, match=r"was not repaired.*manifest-"):
        put_right(remote, "data/part", SAVED)
    assert (directory / "data" / "part").read_bytes() == b"damaged"


def test_no_link_is_followed(directory, remote):
    outside = directory.parents[3] / "outside"
    (directory / "data").rename(outside)
    (directory / "data").symlink_to(outside)
    with pytest.raises(source.RepairError, match="behind a link"):
        put_right(remote, "data/part", SAVED)
    assert (outside / "part").read_bytes() == b"damaged"


def test_an_agent_takes_files_of_its_tree_from_those_who_have_the_secret(
    directory, monkeypatch
):
    monkeypatch.setattr(agent_server, "MOST_FILE_BYTES", len(SAVED))
    root = directory.parents[2]
    known = secret.read_or_create(root)
    part = "/hosts/0/30-0/data/part"
    with served.serving(agent.Service(root=str(root))) as address:

        def put(known, path=part, more=""):
            body = SAVED.decode() + more
            length = f"Content-Length: {len(body)}"
            asked = (length, "", body)
            return served.ask(address.url, path, known, *asked, method="PUT")[0]

        assert put("x" * 32) == 401
        assert put(known, more="x") == 413
        for path in ("/steps", "/hosts/0/30-0", part.replace("/0/", "/x/")):
            assert put(known, path) in (404, 405)
        assert (directory / "data" / "part").read_bytes() == b"damaged"
        assert put(known) == 204
    assert (directory / "data" / "part").read_bytes() == SAVED
