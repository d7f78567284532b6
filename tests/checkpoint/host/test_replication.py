"""A host verifies the copies that it takes, and reports bad ones at holders."""

import numpy as np

from elastic_ckpt.checkpoint.host import replication, verified_read
from elastic_ckpt.steps.holdings import Holdings
from tests.checkpoint.host import test_verified_read


class Writer:
    """Takes the copies instead of a RAM disk."""

    def __init__(self):
        self.kept = []

    def put(self, fragment, read):
        memory = np.empty(fragment.stored_bytes, np.uint8)
        read(memory)
        self.kept.append(memory)

    def put_file(self, _, content):
        self.kept.append(content)


def taken(sources):
    """Takes all items from their first holders; returns the result and kept ones."""
    table = Holdings.from_offers(list(sources))
    items = [(item, table.holders(item)[0].host) for item in range(table.num_items)]
    writer = Writer()
    reader = verified_read.VerifiedReader(sources)
    return replication.take(table, items, reader, writer), writer.kept


def spoil(sources, number, path):
    """Flips a bit of all that one host has of a leaf."""
    (offer,) = (each for each in sources if each.host.number == number)
    contents = offer.manifest.contents
    for row in range(len(offer.manifest.fragments)):
        part = offer.manifest.fragments.row(row, contents=contents)
        if contents.leaves[part.leaf].path == path:
            sources[offer].parts[part.file, part.offset][0] ^= 1


def test_what_is_bad_at_one_holder_is_taken_from_another_and_told():
    _, sources = test_verified_read.saved(2, copies=2)
    spoil(sources, 0, "b")
    values, kept = taken(sources)
    assert values.copies == len(kept) == 3
    (why,) = values.problems
    assert why.startswith("b[] at host host-00 ")
    assert "its digest differs" in why


def test_what_is_bad_at_every_holder_is_not_taken_and_told():
    _, sources = test_verified_read.saved(2)
    spoil(sources, 1, "w")
    values, kept = taken(sources)
    assert values.copies == len(kept) == 2
    assert any("no good copy of w[" in why for why in values.problems)


def test_of_good_copies_nothing_is_told():
    values, kept = taken(test_verified_read.saved(3, copies=2)[1])
    assert (values.copies, values.problems) == (len(kept), ())
