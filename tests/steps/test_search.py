"""Which step is complete, and which one a search finds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, errors
from elastic_ckpt.steps import manifest, search
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.find import FoundStep
from tests.tiers import saved_worlds


def newest(manifests):
    """The newest complete step of some manifests, and why others were passed over."""
    by_step = {}
    for each in manifests:
        by_step.setdefault(each.step_id.step, []).append(each)

    def look(step):
        groups = manifest.grouped(by_step.get(step, []))
        return search.Looked([FoundStep(StepTable(group), ()) for group in groups], [])

    saves = [each.step_id for each in manifests]
    return search.Search(saves, look).newest()


def found(manifests):
    """The newest complete step and save."""
    outcome = newest(manifests)
    return None if outcome.found is None else outcome.found.step_id


def is_complete(manifests):
    """By painting every element."""
    whole = manifests[0].contents
    painted = [np.zeros(leaf.shape, bool) for leaf in whole.leaves]
    for each in manifests:
        for leaf, box, _ in each.rows():
            painted[leaf][tuple(map(slice, box.start, box.stop))] = True
    return all(array.all() for array in painted)


@st.composite
def losses(draw, *, step):
    """The manifests of a step that are left, each in one tier or the other."""
    saved = draw(saved_worlds.saved(most_hosts=5, step=step))
    kept = draw(st.lists(st.booleans(), min_size=len(saved), max_size=len(saved)))
    tiers = st.sampled_from(["local", "persistent"])
    return [
        each.at(draw(tiers)) for each, keep in zip(saved, kept, strict=True) if keep
    ]


@given(st.data())
def test_the_newest_step_without_a_gap_is_found_in_any_mixture_of_tiers(data):
    by_step = {step: data.draw(losses(step=step)) for step in (10, 20, 30)}
    expected = [step for step, left in by_step.items() if left and is_complete(left)]
    mixed = [each for left in by_step.values() for each in left]
    outcome = newest(data.draw(st.permutations(mixed)))
    step = None if outcome.found is None else outcome.found.step_id.step
    assert step == max(expected, default=None)
    assert list(outcome.passed_over) == [
        step
        for step in (30, 20, 10)
        if by_step[step] and step > max(expected, default=0)
    ]


SHAPES = {"params/b": [], "params/w": [8, 4]}
WHOLE = saved_worlds.contents(SHAPES, files=4)
PARTS = saved_worlds.grid([8, 4], [4, 1])


def saved_by(number, *, files=True, **options):
    held = [(1, PARTS[number])] + [(0, boxes.whole(()))] * (number == 0)
    held += [saved_worlds.file_of(WHOLE, number)] * files
    host = saved_worlds.host(number, 2, 4)
    return saved_worlds.saved_by(host, WHOLE, held, **options)


def four(**options):
    return [saved_by(number, **options) for number in range(4)]


def test_what_is_missing_is_named():
    lacking = four(step=40)
    lacking[1] = saved_by(1, step=40, files=False)
    held = [saved_worlds.file_of(WHOLE, 2)]
    lacking[2] = saved_worlds.saved_by(lacking[2].host, WHOLE, held, step=40)
    outcome = newest([*four(step=30), *lacking])
    assert outcome.found.step_id.step == 30
    assert outcome.passed_over == {
        40: "step 40 in local lacks parts of 2 of 6 arrays and files:"
        " [params/w[4:6, 0:4], data/shard-00001.json]"
    }


def test_two_saves_of_a_step_are_never_mixed():
    first, second = four(save="1")[:2], four(save="2")[2:]
    assert found([*first, *second]) is None
    assert found([*first, *four(save="2")]) == (30, "2")
    # The one that is complete, not the last.
    assert found([*four(save="1"), *second]) == (30, "1")


def test_a_step_whose_replicas_have_other_values_is_not_complete():
    host = saved_worlds.host(7)
    held = [(1, PARTS[2]), saved_worlds.file_of(WHOLE, 1)]
    replica = saved_worlds.saved_by(host, WHOLE, held)
    assert found([*four(), replica])
    other = replica.parts._replace(digest=replica.parts.digest + np.uint64(1))
    outcome = newest([*four(), dataclasses.replace(replica, parts=other)])
    assert outcome.passed_over == {
        30: "step 30 in local has different values at the holders of 2 parts:"
        " [params/w[4:6, 0:4], data/shard-00001.json]"
    }


def test_manifests_of_two_runs_are_refused():
    stranger = dataclasses.replace(four()[3], run="another")
    with pytest.raises(errors.CheckpointError, match=r"host-03.*run 'another'.*remove"):
        StepTable([*four(), stranger])


def test_a_manifest_that_lists_another_model_does_not_complete_a_step():
    other = saved_worlds.contents({"params/w": [8, 4]}, files=4)
    stranger = saved_worlds.saved_by(saved_worlds.host(3), other, [(0, PARTS[3])])
    assert found([*four()[:3], stranger]) is None
    assert found([*four(), stranger])
