"""The suite `scale` drives a save and a restore of many hosts by the product's code."""

import pytest

from benchmarks import scale_traffic


@pytest.mark.slow
def test_the_messages_of_a_host_do_not_grow_with_the_hosts():
    # From 100 hosts on there is one with as many children, all of which have some.
    (saved, restored), (saved_by_more, restored_by_more) = map(
        scale_traffic.measure, (100, 200)
    )
    assert saved_by_more.messages <= saved.messages
    assert restored_by_more.messages <= restored.messages
