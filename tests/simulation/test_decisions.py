"""Cached decisions are those of the functions, whatever is lost."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.simulation.decisions import Decisions, Readers, Shape, WorldLayout
from elastic_ckpt.steps import owners


@st.composite
def restores(draw):
    """A world that saved, the hosts that are dead, and the hosts that restore."""
    slices, per_slice = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    hosts = slices * per_slice
    racks = ()
    if draw(st.booleans()):
        size = draw(st.integers(1, 4))
        racks = tuple(number // size for number in range(hosts))
    shape = Shape(slices=slices, hosts_per_slice=per_slice, racks=racks)
    dead = draw(st.sets(st.integers(0, hosts - 1)))
    new_slices = draw(st.integers(1, 4))
    savers = draw(st.permutations(range(slices + 2)))[:new_slices]
    saver = [
        each * per_slice + place if each < slices else -1
        for each in savers
        for place in range(per_slice)
    ]
    domains = shape.domains
    strange = int(domains.max()) + 1
    readers = Readers(
        saver=np.array(saver),
        domain=np.array([domains[each] if each >= 0 else strange for each in saver]),
    )
    return shape, frozenset(dead), readers


@settings(max_examples=8)
@given(restores(), st.integers(0, 3), st.booleans(), st.booleans())
def test_cached_decisions_are_those_of_the_functions(
    restore, copies, has_copies, is_stored
):
    shape, dead, readers = restore
    layout = WorldLayout(state_bytes=1000, domain="rack" if shape.racks else "slice")
    policy = owners.Policy(copies=copies, domain=layout.domain)
    outcomes = []
    for is_cached in (True, False):
        decisions = Decisions(layout, policy, is_cached=is_cached)
        # Other inputs that the cache may take for the same.
        for lost in (dead, set(), dead, set(range(shape.hosts))):
            held = decisions.held(shape)
            if not has_copies:
                held = decisions.without_copies(held)
            complete = decisions.is_complete(held, lost, is_stored=is_stored)
            outcomes.append((is_cached, complete))
            if complete:
                reads = decisions.reads(held, lost, readers, is_stored=is_stored)
                outcomes.append((is_cached, reads))
    cached = [each for is_cached, each in outcomes if is_cached]
    assert cached == [each for is_cached, each in outcomes if not is_cached]


def test_hosts_read_their_own_parts_and_newcomers_those_of_others():
    shape = Shape(slices=3, hosts_per_slice=2)
    decisions = Decisions(WorldLayout(state_bytes=4000), owners.Policy(copies=2))
    # Slice 1 is lost, and one that was not in the world takes its place.
    readers = Readers(
        saver=np.array([0, 1, 4, 5, -1, -1]), domain=np.array([0, 0, 2, 2, 3, 3])
    )
    reads = decisions.reads(decisions.held(shape), {2, 3}, readers, is_stored=False)
    assert reads.all_hosts == (8000, 0, 4000, 0)
    assert reads.most == (2000, 0, 2000, 0)
    assert reads.farthest == "distant"
    held, everyone = decisions.held(shape), set(range(6))
    assert not decisions.is_complete(held, everyone, is_stored=False)
    assert decisions.is_complete(held, everyone, is_stored=True)
    readers = Readers(saver=np.arange(2), domain=np.zeros(2, int))
    reads = decisions.reads(held, everyone, readers, is_stored=True)
    assert reads.all_hosts == (0, 0, 0, 4000)
