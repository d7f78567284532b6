"""The choice of the host that uploads each item."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.steps import holdings, part_choices, part_table, uploads
from elastic_ckpt.steps.part_table import PartTable
from tests.tiers import saved_worlds


def loads(holding, chosen):
    there = chosen.host >= 0
    return np.bincount(
        chosen.host[there], holding.stored_bytes[there], len(chosen.hosts)
    )


@given(saved_worlds.saved(), st.data())
def test_each_item_is_uploaded_once_by_a_host_that_has_it(offers, data):
    holding = holdings.Holdings.from_offers(offers)
    hosts = data.draw(st.lists(st.sampled_from([o.host for o in offers]), unique_by=id))
    chosen = uploads.uploads(holding, hosts)
    mine = {host.id: chosen.items_of(host.id).tolist() for host in hosts}
    everyone = sorted(item for items in mine.values() for item in items)
    assert everyone == np.flatnonzero(chosen.host >= 0).tolist()
    assert not set(everyone) & set(chosen.missing.tolist())
    ids = {host.id for host in hosts}
    for item in range(holding.num_items):
        holders = {offer.host.id for offer in holding.holders(item)} & ids
        if not holders:
            assert item in chosen.missing
            continue
        uploader = chosen.hosts[chosen.host[item]].id
        assert uploader in holders
        assert item in mine[uploader]
        row = chosen.row[item]
        assert holding.item[row] == item
        assert holding.offers[holding.holder[row]].host.id == uploader


@given(saved_worlds.saved(), st.data())
def test_items_of_idle_machines_alone_are_uploaded_by_hosts_too(offers, data):
    holding = holdings.Holdings.from_offers(offers)
    every = [offer.host for offer in offers]
    hosts = data.draw(st.lists(st.sampled_from(every), unique_by=id, min_size=1))
    chosen = uploads.of_all_items(holding, hosts)
    assert not len(chosen.missing)
    assert (holding.item[chosen.row] == np.arange(holding.num_items)).all()
    dealt = uploads.uploads(holding, hosts)
    there = dealt.host >= 0
    assert (chosen.host[there] == dealt.host[there]).all()
    # These items add to the least loaded host each time.
    load, before = loads(holding, chosen), loads(holding, dealt)
    most = holding.stored_bytes.max()
    assert (load <= np.maximum(before, load.mean() + most)).all()


@given(saved_worlds.saved(), st.randoms(use_true_random=False))
def test_every_host_computes_the_same_whatever_the_order(offers, random):
    hosts = [offer.host for offer in offers]
    first = uploads.uploads(holdings.Holdings.from_offers(offers), hosts)
    shuffled = random.sample(offers, len(offers))
    second = uploads.uploads(holdings.Holdings.from_offers(shuffled), hosts)
    assert first.host.tolist() == second.host.tolist()
    random.shuffle(hosts)
    third = uploads.uploads(holdings.Holdings.from_offers(offers), hosts)
    assert first.host.tolist() == third.host.tolist()
    assert first.row.tolist() == third.row.tolist()


def least_possible(holding):
    """A lower bound of the load of the busiest host, for any division of the items."""
    holders = [
        {offer.host.id for offer in holding.holders(item)}
        for item in range(holding.num_items)
    ]
    ids = [offer.host.id for offer in holding.offers]
    # The items that some hosts alone have are theirs: over all sets of hosts this bound
    # is exact, where items may be cut.
    return max(
        sum(
            holding.stored_bytes[n]
            for n, each in enumerate(holders)
            if each <= set(some)
        )
        / len(some)
        for size in range(1, len(ids) + 1)
        for some in itertools.combinations(ids, size)
    )


@given(saved_worlds.saved(most_hosts=6))
def test_no_host_has_far_more_than_the_best_assignment_would_give_it(offers):
    holding = holdings.Holdings.from_offers(offers)
    hosts = [offer.host for offer in offers]
    load = loads(holding, uploads.uploads(holding, hosts))
    # Whole items cost the best one no more than the largest of them.
    best = least_possible(holding) + holding.stored_bytes.max()
    assert load.max() <= (math.ceil(math.log2(len(hosts))) + 1) * best


@given(
    st.lists(st.integers(0, 100), max_size=60), st.integers(1, 150), st.integers(1, 20)
)
def test_batches_are_as_large_as_allowed_and_all_items_are_in_one(
    sizes, most_bytes, most_items
):
    items = np.arange(100, 100 + len(sizes))
    batches = uploads.batches(
        items, np.array(sizes, int), most_bytes=most_bytes, most_items=most_items
    )
    together = [item for batch in batches for item in batch.tolist()]
    assert together == items.tolist()
    of_batch = [[sizes[item - 100] for item in batch] for batch in batches]
    for batch in of_batch:
        assert 1 <= len(batch) <= most_items
        assert len(batch) == 1 or sum(batch) <= most_bytes
    for batch, after in itertools.pairwise(of_batch):
        # The next item did not fit.
        assert len(batch) == most_items or sum(batch) + after[0] > most_bytes


def items_of(held):
    """The boxes and files of holdings, as values."""
    boxes = [(int(leaf), held.boxes[number]) for number, leaf in enumerate(held.leaf)]
    return [*boxes, *(file.path for file in held.files)]


@given(saved_worlds.saved())
def test_shares_that_hosts_receive_are_those_of_the_uploads(offers):
    # The first host is idle: what it alone has is dealt to the others.
    hosts = [offer.host for offer in offers][1:] or [offers[0].host]
    (table,) = part_table.joined([PartTable.from_offer(offer) for offer in offers])
    holding = holdings.Holdings.from_offers(table.offers())
    shared = uploads.of_all_items(holding, hosts)
    tables = part_choices.of_uploads(table, holding, shared, hosts)
    everything = items_of(holding)
    group = np.arange(len(hosts))
    of_groups = [each.for_groups(group, len(hosts)) for each in tables]
    for host, *parts in zip(hosts, *of_groups, strict=True):
        received = [offer for part in parts for offer in part.offers()]
        expected = [everything[item] for item in shared.items_of(host.id)]
        if not received:
            assert not expected
            continue
        own = holdings.Holdings.from_offers(received)
        assert items_of(own) == expected
