import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import storage_cause
from elastic_ckpt.steps import holdings, placement, search
from tests.tiers import saved_worlds


def table(offers):
    return holdings.Holdings.from_offers(offers)


def hosts_of(offers):
    return [offer.host for offer in offers]


def holders(holding, placed):
    """The hosts that have each box when the copies are made."""
    of_box = [
        {offer.host.id for offer in holding.holders(n)}
        for n in range(holding.num_items)
    ]
    for box, source, target in zip(
        placed.item, placed.source, placed.target, strict=True
    ):
        assert placed.hosts[source].id in {o.host.id for o in holding.holders(box)}
        assert placed.hosts[target].id not in of_box[box]
        of_box[box].add(placed.hosts[target].id)
    return of_box


def lacking(placed, *kinds):
    return {
        box for each in placed.shortfalls if each.lacks in kinds for box in each.items
    }


def uniform(num_slices, slice_hosts, *, boxes_a_host=16, replicas=1):
    """Hosts with equal boxes; of each slice the boxes are also in the next ones."""
    hosts = num_slices * slice_hosts
    assert num_slices % replicas == 0
    distinct = hosts // replicas
    whole = saved_worlds.contents({"w": [distinct * boxes_a_host]})
    parts = saved_worlds.grid([distinct * boxes_a_host], [distinct * boxes_a_host])
    return [
        saved_worlds.offer(
            saved_worlds.host(number, num_slices, hosts),
            whole,
            [
                (0, parts[number % distinct * boxes_a_host + n])
                for n in range(boxes_a_host)
            ],
        )
        for number in range(hosts)
    ]


@given(saved_worlds.saved(), st.integers(1, 3))
def test_no_lost_host_and_no_lost_slice_loses_what_was_guaranteed(offers, copies):
    holding, hosts = table(offers), hosts_of(offers)
    placed = placement.place(holding, hosts, placement.Policy(copies=copies))
    of_box = holders(holding, placed)
    slices = {host.id: host.domains["slice"] for host in hosts}
    for box, ids in enumerate(of_box):
        if box not in lacking(placed, "copies"):
            assert len(ids) >= copies + 1
        if box not in lacking(placed, "domain"):
            assert len({slices[each] for each in ids}) >= 2
    assert placed.num_machines == min(len(ids) for ids in of_box)
    # The reported shortfall is real: the world has no more hosts.
    assert lacking(placed, "copies") == (
        set(range(len(of_box))) if len(hosts) < copies + 1 else set()
    )
    assert lacking(placed, "domain") == (
        set(range(len(of_box))) if len(set(slices.values())) < 2 else set()
    )


@given(saved_worlds.saved())
def test_the_order_of_manifests_and_hosts_does_not_matter(offers):
    def copies(listed):
        placed = placement.place(table(listed), hosts_of(listed)[::-1])
        holding = table(listed)
        return {
            (holding.name(box), placed.hosts[source].id, placed.hosts[target].id)
            for box, source, target in zip(
                placed.item.tolist(), placed.source, placed.target, strict=True
            )
        }

    assert copies(offers) == copies(offers[::-1])


def test_one_copy_is_distant_and_one_is_close():
    holding = table(uniform(4, 4))
    hosts = hosts_of(holding.offers)
    slices = {host.id: host.domains["slice"] for host in hosts}
    placed = placement.place(holding, hosts)
    assert not placed.shortfalls
    for box, ids in enumerate(holders(holding, placed)):
        (saver,) = holding.holders(box)
        others = ids - {saver.host.id}
        own = saver.host.domains["slice"]
        assert sorted(slices[each] == own for each in others) == [False, True]


def in_kinds(num_hosts, **number_of):
    """Hosts with four boxes each, in domains by their number: boxes and hosts."""
    whole = saved_worlds.contents({"w": [num_hosts * 4]})
    parts = saved_worlds.grid([num_hosts * 4], [num_hosts * 4])
    offers = []
    for number in range(num_hosts):
        host = saved_worlds.host(number, 1, num_hosts)
        kinds = {kind: str(label(number)) for kind, label in number_of.items()}
        host = dataclasses.replace(host, domains={"host": host.id, **kinds})
        boxes = [(0, part) for part in parts[4 * number : 4 * number + 4]]
        offers.append(saved_worlds.offer(host, whole, boxes))
    return table(offers), hosts_of(offers)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=12),
    st.integers(1, 3),
)
def test_the_loss_of_a_domain_of_either_kind_loses_nothing(labels, copies):
    # Racks and slices may cut through each other.
    holding, hosts = in_kinds(
        len(labels), rack=lambda n: labels[n][0], slice=lambda n: labels[n][1]
    )
    policy = placement.Policy(copies=copies, domain="rack", inner="slice")
    placed = placement.place(holding, hosts, policy)
    domains = {host.id: host.domains for host in hosts}
    for box, ids in enumerate(holders(holding, placed)):
        (saver,) = holding.holders(box)
        own = saver.host.domains
        apart = any(
            each["rack"] != own["rack"] and each["slice"] != own["slice"]
            for each in domains.values()
        )
        for kind in ("rack", "slice"):
            if apart:
                assert len({domains[each][kind] for each in ids}) >= 2
        if len({each["rack"] for each in domains.values()}) >= 2:
            assert len({domains[each]["rack"] for each in ids}) >= 2
        if copies < len(hosts):
            assert len(ids) == copies + 1


def test_what_has_its_copies_is_not_copied_again():
    # Replicas of data parallelism are holders, too.
    for replicas, copies in ((2, 1), (4, 2), (4, 3)):
        offers = uniform(4, 2, replicas=replicas)
        policy = placement.Policy(copies=copies)
        placed = placement.place(table(offers), hosts_of(offers), policy)
        assert (len(placed.item), placed.shortfalls) == (0, ())
    offers = uniform(4, 4)
    hosts = hosts_of(offers)
    placed = placement.place(table(offers), hosts)
    again = placement.place(table(received(offers, placed)), hosts)
    assert (len(again.item), again.shortfalls) == (0, ())


def received(offers, placed):
    """The offers of the hosts when the copies have arrived."""
    holding = table(offers)
    whole = offers[0].manifest.contents
    changed = []
    for offer in offers:
        fragments = offer.manifest.fragments
        rows = [fragments.row(n, contents=whole) for n in range(len(fragments))]
        held = [(row.leaf, row.box) for row in rows]
        files = list(offer.manifest.component_files)
        for item, target in zip(placed.item.tolist(), placed.target, strict=True):
            if placed.hosts[target].id != offer.host.id:
                continue
            if item >= len(holding.leaf):
                files.append(holding.files[item - len(holding.leaf)])
            else:
                fragment = holding.fragment(int(holding.first_row[item]))
                held.append((fragment.leaf, fragment.box))
        changed.append(saved_worlds.offer(offer.host, whole, held, files=files))
    return changed


def test_no_host_holds_or_sends_much_more_than_another():
    for shape in ((1, 24), (6, 4), (24, 1)):
        holding = table(uniform(*shape, boxes_a_host=32))
        hosts = hosts_of(holding.offers)
        placed = placement.place(holding, hosts)
        assert len(placed.item) == 2 * len(holding.leaf)
        got = np.bincount(placed.target, minlength=len(hosts))
        sent = np.bincount(placed.source, minlength=len(hosts))
        # Each holds its own 32 and receives about 64.
        assert got.max() + 32 <= 1.3 * (32 + 64)
        assert set(sent) == {64}


def test_hosts_on_one_machine_are_lost_together():
    whole = saved_worlds.contents({"w": [4]})
    parts = saved_worlds.grid([4], [4])
    offers = [
        saved_worlds.offer(
            saved_worlds.host(n, 2, 4, host=f"machine-{n // 2}"), whole, [(0, parts[n])]
        )
        for n in range(4)
    ]
    holding = table(offers)
    placed = placement.place(holding, hosts_of(offers))
    machines = {offer.host.id: offer.host.domains["host"] for offer in offers}
    for ids in holders(holding, placed):
        assert len({machines[each] for each in ids}) == len(ids) == 2
    (short,) = placed.shortfalls
    assert short.why == (
        "4 of 4 items lack copies: they are on fewer than 3 machines, of 2; add"
        " machines, or ask for fewer copies"
    )
    assert [holding.name(item) for item in short.items] == [
        f"w[{n}:{n + 1}]" for n in range(4)
    ]
    # The event of the run has the cause, and no list of leaves.
    assert storage_cause.of_message(short.why) == "too_few"


def test_a_shortfall_says_which_boxes_and_why():
    offers = uniform(1, 4, boxes_a_host=2)
    (short,) = placement.place(table(offers), hosts_of(offers)).shortfalls
    assert short.lacks == "domain"
    assert "lack a distant holder: they are in one slice of 1 alone" in short.why
    assert storage_cause.of_message(short.why) == "too_few"
    placed = placement.place(table(offers), hosts_of(offers)[1:])
    assert {each.lacks: len(each.items) for each in placed.shortfalls} == {
        "holder": 2,
        "domain": 6,
    }


def test_replicas_with_other_values_are_told():
    first, *rest = uniform(4, 2, replicas=2)
    fragments = first.manifest.fragments
    changed = fragments.digest.copy()
    changed[3] += np.uint64(1)
    spoilt = dataclasses.replace(
        first.manifest, fragments=dataclasses.replace(fragments, digest=changed)
    )
    holding = table([holdings.Offer(tier="local", manifest=spoilt), *rest])
    placed = placement.place(holding, hosts_of(rest))
    (short,) = (each for each in placed.shortfalls if each.lacks == "agreement")
    assert [holding.name(box) for box in short.items] == ["w[3:4]"]


@given(saved_worlds.saved())
def test_a_step_is_complete_after_the_loss_of_any_host_or_slice(offers):
    hosts = hosts_of(offers)
    placed = placement.place(table(offers), hosts)
    held = received(offers, placed)
    assert search.newest(held)
    if len(hosts) > 1:
        for lost in hosts:
            assert search.newest([o for o in held if o.host != lost])
    slices = {host.domains["slice"] for host in hosts}
    if len(slices) > 1:
        for lost in slices:
            left = [o for o in held if o.host.domains["slice"] != lost]
            assert search.newest(left)
