"""Which machine leads, and who is left."""

import itertools

from elastic_ckpt.elastic.machines import membership


def choose(own, *, accepting=(), lost=(), waited_secs=0.0):
    return membership.choose_leader(
        own,
        accepting=accepting,
        lost=lost,
        waited_secs=waited_secs,
        lost_secs=10.0,
    )


def test_the_lowest_machine_leads_at_once():
    assert choose(0) == 0


def test_a_service_that_is_there_is_used_also_by_a_lower_machine():
    assert choose(0, accepting=[2]) == 2
    assert choose(3, accepting=[2, 1]) == 1


def test_a_machine_waits_for_each_one_before_it():
    assert choose(2, waited_secs=19.9) is None
    assert choose(2, waited_secs=20.0) == 2


def test_a_lost_machine_is_not_waited_for_nor_joined():
    assert choose(1, lost=[0]) == 1
    assert choose(2, lost=[0], waited_secs=9.9) is None
    # It accepts, but has not answered, or was lost a moment ago.
    assert choose(1, accepting=[0], lost=[0]) == 1


def test_a_follower_of_a_replaced_leader_leads_only_after_it_has_followed_another(
    tmp_path, monkeypatch
):
    joined, accepting = [], []
    monkeypatch.setattr(membership.Membership, "_join", lambda _, n: joined.append(n))
    monkeypatch.setattr(membership.Membership, "_accepting", lambda *_: accepting)
    now_secs = itertools.count()
    members = membership.Membership(
        *(0, ["127.0.0.1:1", "127.0.0.1:2"]),
        log=str(tmp_path / "log"),
        clock=lambda: next(now_secs),
    )
    members.replaced()
    members.poll()
    assert not joined
    accepting.append(1)
    members.poll()
    assert joined == [1]
    # Its service answers, and is lost.
    members._attempt = 1
    members._take({})
    members._lose()
    members.poll()
    assert joined == [1, 0]


def test_half_of_the_machines_are_no_majority():
    assert membership.has_majority([0, 1], 3)
    assert not membership.has_majority([0, 1], 4)
    assert not membership.has_majority([2], 2)
    assert membership.has_majority([0], 1)
