"""Which machine leads, and who is left."""

from elastic_ckpt.elastic import membership


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


def test_half_of_the_machines_are_no_majority():
    assert membership.has_majority([0, 1], 3)
    assert not membership.has_majority([0, 1], 4)
    assert not membership.has_majority([2], 2)
    assert membership.has_majority([0], 1)
