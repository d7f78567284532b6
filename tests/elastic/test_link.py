"""Supervisors exchange messages over a link that needs the key."""

import contextlib
import errno
import threading

import pytest

from elastic_ckpt.elastic import link


@pytest.fixture
def listener():
    with contextlib.closing(link.Listener("127.0.0.1", 600)) as listener:
        yield listener


@pytest.fixture
def ends(listener):
    """Both ends of a link: the one that connected, and the one that was accepted."""
    far = link.connect(listener.address, listener.key, 600, machine=1)
    near = listener.accepted.get(timeout=600)
    with contextlib.closing(far), contextlib.closing(near):
        yield far, near


def messages(one):
    found = []
    while not found:
        one.channel.poll(1)
        found = one.receive()
    return found


def test_messages_go_both_ways_until_one_side_ends_the_link(ends):
    far, near = ends
    assert near.hello == {"machine": 1}
    far.send(machine=1)
    near.send(start=[1, 0])
    near.send()
    assert messages(near) == [{"machine": 1}]
    assert messages(far) == [{"start": [1, 0]}]
    far.send(exit=3)
    far.close()
    # What was sent before arrives.
    assert messages(near) == [{"exit": 3}]
    with pytest.raises(link.LinkLostError):
        messages(near)


def test_a_peer_that_gives_no_sign_is_lost(ends):
    _, near = ends
    near._lost_secs = -1.0
    with pytest.raises(link.LinkLostError, match="stopped responding"):
        near.receive()


def test_a_peer_that_sends_no_json_is_lost(ends):
    far, near = ends
    far.channel.send_bytes(b"\xff")
    with pytest.raises(link.LinkLostError, match="other than JSON"):
        messages(near)


def test_a_connection_without_the_key_is_refused(listener):
    with pytest.raises(link.LinkLostError):
        link.connect(listener.address, "another key", 600)
    assert listener.accepted.empty()


def test_a_machine_without_descriptors_accepts_peers_later(monkeypatch, request):
    accept, errors = link.socket.socket.accept, [OSError(errno.EMFILE, "Too many")]

    def scarce(listening):
        if errors:
            raise errors.pop()
        return accept(listening)

    monkeypatch.setattr(link.socket.socket, "accept", scarce)
    request.getfixturevalue("ends")
    assert not errors


def test_a_peer_that_shows_the_key_too_late_is_not_linked():
    with contextlib.closing(link.Listener("127.0.0.1", 600)) as listener:
        pass
    with link.socket.create_server(("127.0.0.1", 0)) as server:
        ours = link.socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    peer = threading.Thread(target=listener._admit, args=(theirs,))
    peer.start()
    channel = link._as_connection(ours, 600)
    link.connection.answer_challenge(channel, listener.key.encode())
    link.connection.deliver_challenge(channel, listener.key.encode())
    channel.send_bytes(b"{}")
    peer.join()
    assert listener.accepted.empty()
    with pytest.raises(EOFError):
        channel.recv_bytes()
    channel.close()
