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


@pytest.fixture
def directory(tmp_path):
    """The directory of a step whose file is bad."""
    made = served.save(tmp_path / "root", 30, {"data/part": SAVED, "data/b": b"other"})
    (tmp_path / "root" / machine.FILE).write_text(served.MACHINE)
    (made / "data" / "part").write_bytes(b"damaged")
    return made


def test_a_bad_file_is_replaced_and_one_that_is_gone_is_made(directory):
    for _ in range(2):
        ram_disk.put_right(directory, "data/part", SAVED)
        assert (directory / "data" / "part").read_bytes() == SAVED
        shutil.rmtree(directory / "data")


def test_an_agent_puts_right_files_of_steps_alone_for_those_who_have_the_secret(
    directory, monkeypatch
):
    monkeypatch.setattr(agent_server, "MOST_FILE_BYTES", len(SAVED) + 1)
    root, part = directory.parents[2], directory / "data" / "part"
    client = peer_client.PeerClient(lambda: known, timeout_secs=600)
    known, outside = secret.read_or_create(root), root.parent / "outside"
    with (
        served.serving(agent.Service(root=str(root))) as address,
        contextlib.closing(client),
    ):
        ((_, remote),) = peer.Peer(address.url, client, served.RUN).offers(30).copies

        def put(file, content):
            leaf = served.leaf_of(file, content)
            remote.put_right(leaf, boxes.whole(leaf.shape), content)

        def refuse(why, file="data/part", content=SAVED, *, there=part, here=True):
            with pytest.raises(source.RepairError, match=why):
                put(file, content)
            # So does a program of this machine, which needs no agent.
            if here:
                with pytest.raises(source.RepairError, match=why):
                    ram_disk.put_right(directory, file, content)
            assert there.read_bytes() == b"damaged"

        refuse("its digest differs", content=SAVED[:-1] + b"x")
        refuse("its digest differs", content=SAVED + b"x")
        refuse("status 413", content=SAVED + b"xx", here=False)
        refuse("its manifest lists no such file", "data/new")
        refuse("lists no such file|has no such file", "../30-0/data/part")
        for path in ("/steps", "/hosts/0/30-0", "/hosts/x/30-0/data/part"):
            with pytest.raises(source.RepairError):
                client.endpoint(address.url).put(path, SAVED)
        known = "x" * 32
        refuse("does not take the run's secret", here=False)
        known = secret.read_or_create(root)
        (directory / "data").rename(outside)
        (directory / "data").symlink_to(outside)
        refuse("behind a link", there=outside / "part")
        (directory / "data").unlink()
        outside.rename(directory / "data")
        (kept,) = directory.glob("manifest-*")
        kept.rename(outside)
        refuse(r"was not repaired.*manifest-")
        outside.rename(kept)
        put("data/part", SAVED)
        assert part.read_bytes() == SAVED


def test_a_repair_waits_while_a_process_removes_the_step(directory):
    with futures.ThreadPoolExecutor(1) as executor:
        with ram_disk.repairing(directory.parent):
            repair = executor.submit(ram_disk.put_right, directory, "data/part", SAVED)
            assert not futures.wait([repair], timeout=0.2).done
            storage.remove(directory)
        with pytest.raises(source.RepairError, match="was not repaired"):
            repair.result()
    assert not directory.exists()
