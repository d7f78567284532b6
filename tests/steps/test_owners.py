"""Who uploads what several hosts hold."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.steps import owners

HOLDERS = st.sets(st.integers(0, 5), min_size=1).map(lambda each: tuple(sorted(each)))


@given(st.lists(st.tuples(HOLDERS, st.integers(0, 1000))))
def test_holders_of_a_set_upload_equal_shares_up_to_an_item_and_agree(items):
    holders = [each for each, _ in items]
    num_bytes = np.array([size for _, size in items], np.int64)
    uploaders = owners.shares(holders, num_bytes)
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
        found = owners.shares([holders[n] for n in own], num_bytes[own])
        assert found == [uploaders[n] for n in own]
