"""Bad files in a RAM disk are replaced by what was saved, and by nothing else."""

import contextlib
from concurrent import futures

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers import agent, agent_server, peer, peer_client, secret
from elastic_ckpt.tiers.ram import file_repair, machine
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
        (made,) = peer.Peer(address.url, client, served.RUN).offers(30).sources.values()
        yield made


def test_a_bad_file_is_replaced_by_what_was_saved(directory):
    file_repair.replace(directory, "data/part", SAVED)
    assert (directory / "data" / "part").read_bytes() == SAVED


def test_a_missing_file_and_its_directory_are_made(directory):
    for name in ("part", "other"):
        (directory / "data" / name).unlink()
    (directory / "data").rmdir()
    file_repair.replace(directory, "data/part", SAVED)
    assert (directory / "data" / "part").read_bytes() == SAVED


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("data/part", SAVED[:-1] + b"x", "its digest differs"),
        ("data/part", SAVED + b"x", "has 14001 bytes, and 14000 were saved"),
        ("data/new", SAVED, "its manifest lists no such file"),
        ("../30-0/data/part", SAVED, "its manifest lists no such file"),
    ],
)
def test_anything_else_is_refused(directory, remote, file, content, why):
    with pytest.raises(source.RepairError, match=why):
        file_repair.replace(directory, file, content)
    if ".." not in file:
        with pytest.raises(source.RepairError, match=why):
            remote.put_right(file, content)
    assert (directory / "data" / "part").read_bytes() == b"damaged"
    assert not (directory / "data" / "new").exists()


def test_a_live_process_repairs_its_own_slot(directory, remote):
    with storage.exclusive_lock(directory.parent / "lock"):
        for replace in (
            lambda: file_repair.replace(directory, "data/part", SAVED),
            lambda: remote.put_right("data/part", SAVED),
        ):
            with pytest.raises(source.RepairError, match="a live process has the slot"):
                replace()
    assert (directory / "data" / "part").read_bytes() == b"damaged"
    remote.put_right("data/part", SAVED)
    assert (directory / "data" / "part").read_bytes() == SAVED


def test_the_process_of_a_backup_host_lets_others_repair_its_slot(directory, remote):
    with storage.exclusive_lock(directory.parent / "lock"):
        with file_repair.held_off(directory.parent):
            pass
        remote.put_right("data/part", SAVED)
    assert (directory / "data" / "part").read_bytes() == SAVED


def test_a_repair_waits_while_a_live_process_removes_the_step(directory):
    slot = directory.parent
    with (
        storage.exclusive_lock(slot / "lock"),
        futures.ThreadPoolExecutor(1) as executor,
    ):
        with file_repair.held_off(slot):
            repair = executor.submit(file_repair.replace, directory, "data/part", SAVED)
            assert not futures.wait([repair], timeout=0.2).done
            storage.remove(directory)
        with pytest.raises(source.RepairError, match="was not repaired"):
            repair.result()
    assert not directory.exists()


def test_a_step_that_is_gone_is_not_made_anew(directory, remote):
    next(directory.glob("manifest-*")).unlink()
    with pytest.raises(source.RepairError, match="the manifest of its host"):
        remote.put_right("data/part", SAVED)
    assert (directory / "data" / "part").read_bytes() == b"damaged"


def test_no_link_is_followed(directory, remote):
    outside = directory.parents[3] / "outside"
    (directory / "data").rename(outside)
    (directory / "data").symlink_to(outside)
    with pytest.raises(source.RepairError, match="cannot be written"):
        remote.put_right("data/part", SAVED)
    assert (outside / "part").read_bytes() == b"damaged"


class TestRequests:
    """The answers of an agent to requests as they are."""

    @pytest.fixture
    def url(self, directory):
        root = directory.parents[2]
        with served.serving(agent.Service(root=str(root))) as address:
            yield address.url

    PART = "/v1/hosts/0/30-0/data/part"

    def put(self, url, known, num_bytes, *, path=PART):
        length = f"Content-Length: {num_bytes}"
        body = SAVED.decode()
        return served.ask(url, path, known, length, "", body, method="PUT")

    def test_a_client_without_the_secret_is_refused(self, directory, url):
        assert self.put(url, "x" * 32, len(SAVED))[0] == 401
        assert (directory / "data" / "part").read_bytes() == b"damaged"

    def test_a_client_with_the_secret_is_served(self, directory, url):
        known = secret.read_or_create(directory.parents[2])
        assert self.put(url, known, len(SAVED)) == (204, b"")
        assert (directory / "data" / "part").read_bytes() == SAVED

    @pytest.mark.parametrize(
        "path", ["/v1/steps", "/v1/hosts/0/30-0", "/v1/hosts/x/30-0/data/part"]
    )
    def test_other_places_are_404(self, directory, url, path):
        known = secret.read_or_create(directory.parents[2])
        assert self.put(url, known, len(SAVED), path=path)[0] == 404

    def test_what_is_too_large_is_not_read(self, directory, url):
        known = secret.read_or_create(directory.parents[2])
        assert self.put(url, known, agent_server.MOST_FILE_BYTES + 1)[0] == 404
