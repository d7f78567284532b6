"""Supervisors exchange messages over a link that needs the key."""

import contextlib

import pytest

from elastic_ckpt.elastic import link


@pytest.fixture
def listener():
    with contextlib.closing(link.Listener("127.0.0.1", 600)) as listener:
        yield listener


def messages(one):
    found = []
    while not found:
        one.channel.poll(1)
        found = one.receive()
    return found


def test_messages_go_both_ways_until_one_side_ends_the_link(listener):
    far = link.connect(listener.address, listener.key, 600)
    near = listener.accepted.get()
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
    near.close()


def test_a_connection_without_the_key_is_refused(listener):
    with pytest.raises(link.LinkLostError):
        link.connect(listener.address, "another key", 600)
    assert listener.accepted.empty()


def test_a_peer_that_gives_no_sign_is_lost(listener):
    far = link.connect(listener.address, listener.key, 1e9)
    near = listener.accepted.get()
    far.send(machine=1)
    assert messages(near) == [{"machine": 1}]
    near._lost_secs = -1.0
    with pytest.raises(link.LinkLostError, match="gives no sign"):
        near.receive()
    far.close()
    near.close()


def test_an_address_at_which_nothing_listens_refuses():
    listener = link.Listener("127.0.0.1", 600)
    listener.close()
    with pytest.raises(link.LinkLostError) as lost:
        link.connect(listener.address, listener.key, 600)
    assert isinstance(lost.value.__cause__, ConnectionRefusedError)
