"""Each host is given the parts of its share, at the holders that it asks first."""

import numpy as np
from hypothesis import given

from elastic_ckpt.steps import part_choices, part_table, uploads
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.part_table import PartTable
from tests.tiers import saved_worlds


def decided(offers, hosts):
    """The table, the holdings and the uploads of a step."""
    (table,) = part_table.joined([PartTable.from_offer(offer) for offer in offers])
    holdings = Holdings.from_offers(table.offers())
    return table, holdings, uploads.of_all_items(holdings, hosts)


def items_of(holdings):
    """The boxes and files of holdings, as values."""
    boxes = [
        (int(leaf), holdings.boxes[number]) for number, leaf in enumerate(holdings.leaf)
    ]
    return [*boxes, *(file.path for file in holdings.files)]


@given(saved_worlds.saved())
def test_shares_that_hosts_receive_are_those_of_the_uploads(offers):
    # The first host is idle: what it alone has is dealt to the others.
    hosts = [offer.host for offer in offers][1:] or [offers[0].host]
    table, holdings, shared = decided(offers, hosts)
    tables = part_choices.of_uploads(table, holdings, shared, hosts)
    everything = items_of(holdings)
    group = np.arange(len(hosts))
    of_groups = [each.for_groups(group, len(hosts)) for each in tables]
    for host, *parts in zip(hosts, *of_groups, strict=True):
        received = [offer for part in parts for offer in part.offers()]
        expected = [everything[item] for item in shared.items_of(host.id)]
        if not received:
            assert not expected
            continue
        own = Holdings.from_offers(received)
        assert items_of(own) == expected
