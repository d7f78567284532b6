"""The step that is left after a loss, against a search over what is left."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import boxes
from elastic_ckpt.inspect import status
from elastic_ckpt.steps import search
from tests.tiers import saved_worlds

WHOLE = saved_worlds.contents({"w": (2,)})
HALVES = [boxes.Box(start=(n,), stop=(n + 1,)) for n in range(2)]


def offer(number, halves, *, step, tier="local"):
    host = saved_worlds.host(number, slices=2, hosts=4)
    held = [(0, HALVES[half]) for half in halves]
    return saved_worlds.offer(host, WHOLE, held, step=step, tier=tier)


@pytest.fixture
def offers():
    """Step 30 needs host 2, step 20 slice s0, and step 10 is in storage."""
    return [
        *(offer(0, [0], step=30), offer(2, [1], step=30)),
        *(offer(0, [0], step=20), offer(1, [0, 1], step=20), offer(3, [], step=20)),
        offer(0, [0, 1], step=10, tier="persistent"),
    ]


def test_each_loss_restores_the_newest_step_that_the_others_have(offers):
    newest = [(each.tier, each.step) for each in status.newest_steps(offers)]
    assert newest == [("local", 30), ("persistent", 10)]
    left = {(each.domain, each.name): each.step for each in status.after_losses(offers)}
    assert left == {
        ("slice", "s0"): 10,
        ("slice", "s1"): 20,
        ("host", "0"): 20,
        ("host", "1"): 30,
        ("host", "2"): 20,
        ("host", "3"): 30,
    }


@given(st.data())
def test_loss_costs_what_a_search_without_that_host_finds(data):
    offers = [
        each
        for step in (10, 20)
        for each in data.draw(saved_worlds.saved(most_hosts=4, step=step))
    ]
    for loss in status.after_losses(offers):
        if loss.domain == "host":
            left = [each for each in offers if str(each.host.number) != loss.name]
            newest = search.newest(left)
            assert loss.step == (newest.step if newest else None)
