import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.steps import holdings, search
from tests.tiers import saved_worlds


def is_complete(offers):
    """By painting every element and every part."""
    whole = offers[0].manifest.contents
    painted = [np.zeros(leaf.shape, bool) for leaf in whole.leaves]
    parts = set()
    for offer in offers:
        fragments = offer.manifest.fragments
        for n in range(len(fragments)):
            row = fragments.row(n, contents=whole)
            at = tuple(map(slice, row.box.start, row.box.stop))
            painted[row.leaf][at] = True
        for file in offer.manifest.component_files:
            parts |= set(range(*file.parts))
    every = all(array.all() for array in painted)
    return every and len(parts) == whole.components["data/cursors"]


@st.composite
def losses(draw, *, step):
    """The offers of a step that are left, each in one tier or the other."""
    offers = draw(saved_worlds.saved(most_hosts=5, step=step))
    kept = draw(st.lists(st.booleans(), min_size=len(offers), max_size=len(offers)))
    tiers = st.sampled_from(["local", "persistent"])
    return [
        dataclasses.replace(offer, tier=draw(tiers))
        for offer, keep in zip(offers, kept, strict=True)
        if keep
    ]


def incomplete(offers):
    """The steps that are newer than the newest complete one."""
    return itertools.takewhile(lambda step: not step.complete, search.steps(offers))


@given(st.data())
def test_the_newest_step_without_a_gap_is_found_in_any_mixture_of_tiers(data):
    by_step = {step: data.draw(losses(step=step)) for step in (10, 20, 30)}
    expected = [
        step for step, offers in by_step.items() if offers and is_complete(offers)
    ]
    mixed = [offer for offers in by_step.values() for offer in offers]
    mixed = data.draw(st.permutations(mixed))
    newest = search.newest(mixed)
    assert (newest.step if newest else None) == max(expected, default=None)
    later = [
        step
        for step in (30, 20, 10)
        if by_step[step] and step > max(expected, default=0)
    ]
    assert [each.step for each in incomplete(mixed)] == later


SHAPES = {"params/b": [], "params/w": [8, 4]}
WHOLE = saved_worlds.contents(SHAPES, **{"data/cursors": 64})
PARTS = saved_worlds.grid([8, 4], [4, 1])


def host_offer(number, **options):
    held = [(1, PARTS[number])] + [(0, saved_worlds.boxes.whole(()))] * (number == 0)
    files = [saved_worlds.data_file(16 * number, 16 * number + 15)]
    host = saved_worlds.host(number, 2, 4)
    return saved_worlds.offer(host, WHOLE, held, **{"files": files, **options})


def four(**options):
    return [host_offer(number, **options) for number in range(4)]


def test_what_is_missing_is_named():
    lacking = four(step=40)
    lacking[1] = host_offer(1, step=40, files=[])
    lacking[2] = saved_worlds.offer(
        lacking[2].host, WHOLE, [], step=40, files=lacking[2].manifest.component_files
    )
    (lacking_step,) = incomplete([*four(step=30), *lacking])
    assert lacking_step.problem() == (
        "step 40 in local lacks parts of 1 of 2 leaves: [params/w[4:6, 0:4]], and lacks"
        " 16 of 64 parts of data/cursors: [16, 17, 18, 19, 20, ...]"
    )


def test_a_lost_host_is_missed_also_where_it_alone_held_a_leaf():
    offers = [*four(step=30), *four(step=40)[1:]]
    assert search.newest(offers).step == 30
    (newer,) = incomplete(offers)
    assert set(newer.gaps) == {0, 1}


def test_two_saves_of_a_step_are_never_mixed():
    first, second = four(save="1")[:2], four(save="2")[2:]
    assert search.newest([*first, *second]) is None
    assert [each.save for each in search.steps([*first, *second])] == ["2", "1"]
    assert search.newest([*first, *four(save="2")]).save == "2"
    # The one that is complete, not the last.
    assert search.newest([*four(save="1"), *second]).save == "1"


def test_a_step_whose_replicas_have_other_values_is_not_complete():
    offers = four()
    host = saved_worlds.host(7)
    replica = saved_worlds.offer(host, WHOLE, [(1, PARTS[2])])
    fragments = replica.manifest.fragments
    spoilt = dataclasses.replace(
        replica.manifest,
        fragments=dataclasses.replace(
            fragments, digest=fragments.digest + np.uint64(1)
        ),
    )
    assert search.newest([*offers, replica])
    offers.append(holdings.Offer(tier="local", manifest=spoilt))
    assert search.newest(offers) is None
    assert next(search.steps(offers)).problem() == (
        "step 30 in local has different values at different holders of 1 parts:"
        " [params/w[4:6, 0:4]]"
    )


def test_files_of_one_name_with_other_bytes_are_not_complete():
    file = saved_worlds.data_file(16, 31)
    other = dataclasses.replace(file, digest=bytes(16))
    offers = [*four(), host_offer(0, files=[other])]
    assert search.newest(offers) is None
    problem = next(search.steps(offers)).problem()
    assert "of 1 parts: [data/shards-00016-00031.json]" in problem


def test_manifests_of_two_runs_are_refused():
    stranger = dataclasses.replace(four()[3].manifest, run="another")
    with pytest.raises(errors.CheckpointError, match=r"host-03.*run 'another'.*remove"):
        search.newest([*four(), holdings.Offer(tier="local", manifest=stranger)])


def test_a_manifest_that_lists_another_model_does_not_complete_a_step():
    other = saved_worlds.contents({"params/w": [8, 4]}, **{"data/cursors": 64})
    stranger = saved_worlds.offer(saved_worlds.host(3), other, [(0, PARTS[3])])
    assert search.newest([*four()[:3], stranger]) is None
    assert search.newest([*four(), stranger])
