"""The step that is left after a loss, against a search over what is left."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import boxes
from elastic_ckpt.inspect import status
from elastic_ckpt.tiers import find, source
from tests.tiers import saved_worlds

WHOLE = saved_worlds.contents({"w": (2,)})
HALVES = [boxes.Box(start=(n,), stop=(n + 1,)) for n in range(2)]


def saved(number, halves, *, step, tier="local"):
    host = saved_worlds.host(number, slices=2, hosts=4)
    held = [(0, HALVES[half]) for half in halves]
    return saved_worlds.saved_by(host, WHOLE, held, step=step, tier=tier)


def found(manifests):
    """The steps of these manifests, the newest first."""
    copies = [source.Copy(each, None) for each in manifests]
    return find.looked(source.Offered(copies, [])).saves


def test_each_loss_restores_the_newest_step_that_the_others_have():
    # Step 30 needs host 2, step 20 slice s0, and step 10 is in storage.
    there = found(
        [
            *(saved(0, [0], step=30), saved(2, [1], step=30)),
            *(saved(0, [0], step=20), saved(1, [0, 1], step=20)),
            saved(3, [], step=20),
            saved(0, [0, 1], step=10, tier="persistent"),
        ]
    )
    newest = [(each.tier, each.step) for each in status.newest_steps(there)]
    assert newest == [("local", 30), ("persistent", 10)]
    left = {(each.domain, each.name): each.step for each in status.after_losses(there)}
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
    manifests = [
        each
        for step in (10, 20)
        for each in data.draw(saved_worlds.saved(most_hosts=4, step=step))
    ]
    for loss in status.after_losses(found(manifests)):
        if loss.domain == "host":
            left = [each for each in manifests if str(each.host.number) != loss.name]
            whole = (each.step_id.step for each in found(left) if not each.problem)
            assert loss.step == next(whole, None)
