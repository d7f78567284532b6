"""Who copies and who uploads what some hosts hold, and in which failure domains."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt import frontend
from elastic_ckpt.core import errors, storage_cause
from elastic_ckpt.steps import owners
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.owners import Owners, Policy, assign_holders
from elastic_ckpt.tiers.choices import Local, Peers
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.training import schema

HOLDERS = st.sets(st.integers(0, 5), min_size=1).map(lambda each: tuple(sorted(each)))
NUMBERS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9))


def world(labels, kinds=("slice",)):
    """Hosts whose domains have these names, by kind; the last label is the machine."""
    return [
        Host(
            id=f"m{machine}.{number}",
            number=number,
            domains=dict(zip([*kinds, "host"], map(str, (*of, machine)), strict=True)),
        )
        for number, (*of, machine) in enumerate(labels)
    ]


def slices(*sizes):
    """Hosts on machines of their own, in slices of these sizes."""
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    return world([(number, machine) for machine, number in enumerate(numbers)])


def placed(hosts, holders, **policy):
    return Owners(hosts, Policy(**policy)).plan_copies(
        holders, np.ones(len(holders), int)
    )


def after(holders, placement):
    """The holders of each item when the copies are made; none is copied to twice."""
    held = [set(each) for each in holders]
    for item, source, target in zip(
        placement.item, placement.source, placement.target, strict=True
    ):
        assert source in held[item]
        assert target not in held[item]
        held[item].add(target)
    return held


@given(st.lists(NUMBERS, min_size=1, max_size=12), st.integers(0, 3), st.data())
def test_no_lost_machine_and_no_lost_domain_of_either_kind_loses_an_item(
    labels, copies, data
):
    # Racks and slices may cut through each other, and through machines.
    hosts = world(labels, ("rack", "slice"))
    numbers = st.sets(st.integers(0, len(hosts) - 1), min_size=1, max_size=4)
    holders = [tuple(sorted(each)) for each in data.draw(st.lists(numbers, max_size=9))]
    policy = {"copies": copies, "domain": "rack", "inner": "slice"}
    placement = placed(hosts, holders, **policy)
    machines = {kinds[-1] for kinds in labels}
    for before, held in zip(holders, after(holders, placement), strict=True):
        of_item = {labels[each][-1] for each in held}
        assert len(of_item) >= min(copies + 1, len(machines))
        # Only a machine that has it already may stand in all other racks.
        others = {rack for rack, _, m in labels if m not in of_item}
        if copies and len({labels[each][0] for each in held}) < 2:
            assert others <= {labels[each][0] for each in held}
        assert len(held) - len(before) <= copies
    # What has its copies gets no more.
    done = [tuple(sorted(each)) for each in after(holders, placement)]
    again = placed(hosts, done, **policy)
    assert not len(again.item)
    assert again.num_machines == placement.num_machines
    assert again.shortfalls == placement.shortfalls


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ((4, 4, 4, 4), 0),
        ((3, 2, 2), 0),
        ((6, 5, 4, 3), 0),
        ((8, 8, 1), 1),
        ((4, 2), 1),
        ((12, 3, 1), 2),
        ((24,), 0),
    ],
)
def test_no_host_receives_much_more_than_it_sends(sizes, most, copies):
    hosts = slices(*sizes)
    holders = [(number,) for number in range(len(hosts))]
    placement = placed(hosts, holders, copies=copies)
    assert len(placement.item) == copies * len(hosts)
    received = np.bincount(placement.target, minlength=len(hosts))
    assert received.max() <= copies + most
    of_slice = [host.domains["slice"] for host in hosts]
    for number, held in enumerate(after(holders, placement)):
        others = [of_slice[each] for each in held - {number}]
        is_apart = [each != of_slice[number] for each in others]
        assert any(is_apart) == (len(sizes) > 1)
        if copies == 2 and sizes[int(of_slice[number])] > 1:
            assert not all(is_apart)


def test_replicas_of_data_parallelism_count_and_share_the_sending():
    hosts = slices(2, 2, 2, 2)
    pairs = [(n % 2, n % 2 + 2) for n in range(8)]
    assert not len(placed(hosts, pairs, copies=1).item)
    placement = placed(hosts, pairs, copies=2)
    sent = collections.Counter(placement.source.tolist())
    assert sent == dict.fromkeys(range(4), 2)
    nothing = placed(hosts, [(0,)], copies=2, assume_data_parallelism=True)
    assert not len(nothing.item)
    assert nothing.num_machines == 1


def test_what_items_lack_is_told_with_the_remedy():
    shared = world([(n // 2, n // 2) for n in range(4)])
    (short,) = placed(shared, [(n,) for n in range(4)], copies=2).shortfalls
    assert short == (
        "parts lack copies: they are on fewer than 3 machines (of 2); add machines, or"
        " reduce the number of copies"
    )
    # The event of the run has the cause, and no list of leaves.
    assert storage_cause.of_message(short) == "too_few"
    placement = placed(slices(4), [(0,), (), ()], copies=2)
    lost, alone = placement.shortfalls
    assert lost.startswith("parts lack a holder in this world: until the next")
    assert alone.startswith("parts lack a distant holder: they are all in one slice")
    assert placement.num_machines == 0


@given(st.lists(st.tuples(HOLDERS, st.integers(0, 1000))))
def test_holders_of_a_set_upload_equal_shares_up_to_an_item_and_agree(items):
    holders = [each for each, _ in items]
    num_bytes = np.array([size for _, size in items], np.int64)
    uploaders = assign_holders(holders, num_bytes)
    assert all(one in of_item for one, of_item in zip(uploaders, holders, strict=True))
    for of_set in set(holders):
        sizes = dict.fromkeys(of_set, 0)
        for one, each, size in zip(uploaders, holders, num_bytes.tolist(), strict=True):
            if each == of_set:
                sizes[one] += size
        largest = max(s for each, s in items if each == of_set)
        share = sum(sizes.values()) / len(of_set)
        assert all(abs(size - share) <= largest for size in sizes.values())
    # Each host finds the same with what it holds itself.
    for host in range(6):
        own = [n for n, each in enumerate(holders) if host in each]
        found = assign_holders([holders[n] for n in own], num_bytes[own])
        assert found == [uploaders[n] for n in own]


def test_a_host_is_in_the_domains_of_its_environment(tmp_path, monkeypatch):
    def saved(**peers):
        """The domains of the host in the manifest of a step that it saved."""
        tiers = [Local(tmp_path), Peers(**peers)]
        with frontend.Checkpointer(tiers, run="run", slice_name="s1") as checkpointer:
            checkpointer.save(1, {"w": jnp.zeros(3)})
        (held,) = ram_disk.RamDisk(tmp_path, run="run").offers(1).held
        return dict(held.manifest.host.domains)

    # A label that the node does not have is empty.
    monkeypatch.setenv(owners.DOMAINS_VARIABLE, "zone=z=1;rack=r1;block=;")
    host = saved(domains={"rack": "r2"})
    assert host.pop("host")
    # The program's own values win.
    assert host == {"slice": "s1", "zone": "z=1", "rack": "r2"}
    monkeypatch.setenv(owners.DOMAINS_VARIABLE, "z1")
    with pytest.raises(errors.CheckpointError, match="ELASTIC_CKPT_DOMAINS='z1'"):
        saved()


def test_the_largest_kind_counts_among_which_hosts_are_spread_evenly():
    for domains, kind, inner in (
        # One zone and one block: slices count.
        (["zone=z;block=b;slice=0", "zone=z;block=b;slice=1"], "slice", ""),
        # The largest kind that parts the hosts, and within it the smallest.
        (["zone=z;block=b;slice=0", "zone=z;block=c;slice=1"], "block", "slice"),
        (["zone=y;block=b;slice=0", "zone=z;block=c;slice=1"], "zone", "slice"),
        (["rack=b;slice=0", "rack=c;slice=0"], "rack", "slice"),
        # Without a label of one host there is no guarantee.
        (["zone=y;slice=0", "slice=1"], "slice", ""),
        (["block=b;slice=0", "block=c"], "block", ""),
        # One host outside could not take the copies of all others.
        (["zone=y;slice=0"] * 3 + ["zone=z;slice=1"], "slice", ""),
        (["zone=y;slice=0"] * 3 + ["zone=z;slice=1"] * 2, "zone", "slice"),
    ):
        hosts = [
            Host(id=f"{n}.0", number=n, domains=owners.parse_domains(each, what="x"))
            for n, each in enumerate(domains)
        ]
        assert owners.domain_kinds(hosts, owners.DEFAULT_DOMAIN) == (kind, inner)
        # A kind that is named alone counts always.
        assert owners.domain_kinds(hosts, "rack") == ("rack", "")
    assert schema.TiersSection().peer_domain == Peers().domain == owners.DEFAULT_DOMAIN
