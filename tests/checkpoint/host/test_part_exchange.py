"""Parts of all hosts reach the one that decides, and its answers reach each host."""

import collections
import functools
import itertools

import pytest

from elastic_ckpt.checkpoint.host import copies
from elastic_ckpt.checkpoint.host.part_exchange import PartExchange
from elastic_ckpt.core.allgather import FAN_IN, HostTree
from elastic_ckpt.steps import owners
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import PartTable
from elastic_ckpt.tiers.source import ReadError
from tests.tiers import saved_worlds

POLICY = owners.Policy(copies=2)
# Two levels below host 0, and a few hosts on a third.
LARGE = FAN_IN * (FAN_IN + 1) + FAN_IN


class Mail:
    """The mail of a host; `office` has the messages of all, `num` counts each host's.

    A message counts at the host that leaves it for others, and at each that reads it.
    """

    def __init__(self, office, num, host):
        self._office, self._num, self._host = office, num, host

    def post(self, name, content):
        self._office[self._host, name] = content

    def read(self, host, name):
        self._num.update([self._host, host])
        if (host, name) not in self._office:
            raise ReadError(f"cannot be read: host {host} has no {name}")
        return self._office[host, name]

    def remove(self, prefix):
        for host, name in list(self._office):
            if host == self._host and name.startswith(prefix):
                del self._office[host, name]


@functools.cache
def offers_of(num_hosts):
    """Offers of hosts that have one row of a leaf each, and a file."""
    whole = saved_worlds.contents({"w": [num_hosts, 2]}, **{"data/cursors": num_hosts})
    rows = saved_worlds.grid([num_hosts, 2], [num_hosts, 1])
    return [
        saved_worlds.offer(
            saved_worlds.host(number, 4, num_hosts),
            whole,
            [(0, rows[number])],
            files=[saved_worlds.data_file(number)],
        )
        for number in range(num_hosts)
    ]


def exchanged(num_hosts, *, lost=()):
    """The decision of host 0, the parts that each host receives, and the mail."""
    office, num = {}, collections.Counter()
    all_parts = [
        PartExchange(Mail(office, num, host), "copies", host=host, num_hosts=num_hosts)
        for host in range(num_hosts)
    ]
    offers = offers_of(num_hosts)
    tree = HostTree(num_hosts=num_hosts)
    unread = []
    for host in itertools.chain.from_iterable(tree.in_order("up")):
        table = PartTable.from_offer(offers[host])
        unread += all_parts[host].offer(PartMessage(tables=(table,)))
        for each in lost:
            office.pop(each, None)
    assert {(each.writer, each.name) for each in unread} == set(lost)
    message = all_parts[0].merged()
    hosts = [offer.host for offer in offers]
    placed, tables = copies.placed_parts(message, hosts, POLICY)
    all_parts[0].deal(tables)
    for parts in all_parts:
        assert not parts.pass_on()
    return placed, [parts.received() for parts in all_parts], (office, num)


def listed(tables):
    """The parts in tables and their holders, by name."""
    return [
        sorted(
            [
                (table.holders[holder].host.id, table.boxes[row])
                for row, holder in enumerate(table.holder.tolist())
            ]
            + [(table.holders[each.holder].host.id, each.file) for each in table.files],
            key=str,
        )
        for table in tables
    ]


@pytest.mark.parametrize("num_hosts", [1, 2, FAN_IN + 2, LARGE])
def test_each_host_receives_what_a_placement_over_all_offers_gives_it(num_hosts):
    placed, received, _ = exchanged(num_hosts)
    offers = offers_of(num_hosts)
    hosts = [offer.host for offer in offers]
    holdings = Holdings.from_offers(offers)
    expected = owners.Owners(hosts, POLICY).place(
        holdings.holder_sets(hosts), holdings.stored_bytes
    )
    assert placed.problems == expected.shortfalls
    assert not placed.failed
    senders = [[] for _ in hosts]
    for item, source, target in zip(
        expected.item, expected.source, expected.target, strict=True
    ):
        at = holdings.holders(item)[0].host.id
        assert at == hosts[source].id
        is_box = item < len(holdings.leaf)
        part = (
            holdings.boxes[item]
            if is_box
            else holdings.files[item - len(holdings.leaf)]
        )
        senders[target].append((at, part))
    assert [listed(tables)[0] for tables in received] == [
        sorted(each, key=str) for each in senders
    ]
    assert [listed(tables)[1] for tables in received] == [[]] * num_hosts


def test_no_host_passes_more_messages_in_a_larger_world_and_none_are_left():
    _, _, (office, num) = exchanged(LARGE)
    assert max(num.values()) <= 2 * FAN_IN + 2
    assert sum(num.values()) <= 2 * 2 * LARGE
    # But those that hosts below have read.
    left = {f"copies-parts-{host}" for host in range(1, LARGE)}
    assert {name for _, name in office} == left


def test_a_host_whose_offer_is_lost_is_named_and_the_rest_is_placed():
    placed, received, _ = exchanged(60, lost=[(40, "copies-offered")])
    assert placed.failed
    assert placed.problems[0].startswith("the parts of host 40: the list cannot be")
    assert sum(len(tables[0]) for tables in received) == 2 * 59
