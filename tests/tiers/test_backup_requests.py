"""Only the agent of a backup host takes requests, from those who know the secret."""

import contextlib

import pytest

from elastic_ckpt.tiers import source
from elastic_ckpt.tiers.peers import (
    agent,
    agent_server,
    backup_directory,
    peer_client,
    secret,
)
from tests.tiers import served


@contextlib.contextmanager
def endpoint(root, known=None):
    with served.serving(agent.Service(root=str(root))) as address:
        known = known or secret.read(secret.path(root))
        with contextlib.closing(peer_client.PeerClient(known)) as client:
            yield client.endpoint(address.url)


@pytest.fixture
def root(tmp_path):
    backup_directory.make(tmp_path / "ram")
    return tmp_path / "ram"


def test_the_newest_request_counts_and_is_taken_once(root):
    with endpoint(root) as peer:
        for content in (b"first", b"second"):
            peer.put(backup_directory.URL_PATH, content)
    assert backup_directory.take_request(root) == b"second"
    assert backup_directory.take_request(root) is None


def test_other_machines_take_none(tmp_path):
    (tmp_path / "ram").mkdir()
    with endpoint(tmp_path / "ram") as peer, pytest.raises(source.RepairError):
        peer.put(backup_directory.URL_PATH, b"request")
    assert backup_directory.take_request(tmp_path / "ram") is None


def test_without_the_secret_or_above_the_limit_nothing_is_stored(root, monkeypatch):
    unknown = "another-secret-of-the-run"
    with endpoint(root, unknown) as peer, pytest.raises(source.RepairError):
        peer.put(backup_directory.URL_PATH, b"request")
    monkeypatch.setattr(agent_server, "MOST_REQUEST_BYTES", 4)
    with endpoint(root) as peer, pytest.raises(source.RepairError):
        peer.put(backup_directory.URL_PATH, b"request")
    assert backup_directory.take_request(root) is None
