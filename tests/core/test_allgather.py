"""Values of all hosts reach all hosts, by few requests of each."""

from concurrent import futures

import hypothesis
import pytest
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.core.allgather import FAN_IN, Allgather, HostTree
from tests.core import thread_store


def on_hosts(num_hosts, drive, *, hosts=None, lost=""):
    """The result or error of each host, in the order of `hosts`; and the store."""
    store = thread_store.Store(lost)
    with futures.ThreadPoolExecutor(num_hosts) as threads:
        doing = [
            threads.submit(
                drive, Allgather(store, "test", host=host, num_hosts=num_hosts)
            )
            for host in hosts or range(num_hosts)
        ]
        return [each.exception() or each.result() for each in doing], store


@pytest.mark.parametrize("num_hosts", [1, FAN_IN + 2, 80])
def test_every_host_gets_the_value_of_each_host_by_few_requests(num_hosts):
    # Some neighbours have the same.
    values = [{"host": host // 3, "parity": host % 2} for host in range(num_hosts)]

    def drive(own):
        for kind in ("even", "odd") * 2:
            results = own.gather(kind, values[own.host], timeout_secs=60)
        return results

    results, store = on_hosts(num_hosts, drive)
    assert results == [values] * num_hosts
    # No host makes more in a larger world, and old values are removed.
    assert max(store.requests.values(), default=0) <= 4 * (FAN_IN + 2)
    assert sum(store.requests.values()) < 4 * 3 * num_hosts
    assert len({key.split("/")[2] for key in store.values}) <= 1


@pytest.mark.parametrize("order", ["up", "down"])
def test_each_host_waits_for_those_of_its_branch_that_come_before(order):
    num_hosts = FAN_IN * (FAN_IN + 1)
    begun, done = {}, set()

    def drive(own):
        def work():
            begun[own.host] = set(done)
            done.add(own.host)
            return own.host

        return [
            own.run("kind", work, order=order, timeout_secs=60),
            own.run("kind", lambda: 0, order=order, timeout_secs=60),
        ]

    # Those that have to wait longest are asked first.
    hosts = range(num_hosts)[:: 1 if order == "up" else -1]
    results, store = on_hosts(num_hosts, drive, hosts=hosts)
    assert results == [[list(range(num_hosts)), [0] * num_hosts]] * num_hosts
    tree = HostTree(num_hosts=num_hosts)
    for host in range(num_hosts):
        parents = {subtree.start for subtree in tree.way(host)[-2:-1]}
        before = set(tree.below(host)[1:]) if order == "up" else parents
        assert before <= begun[host]
    assert {key.split("/")[2] for key in store.values} == {"1"}


def test_a_host_that_is_missing_is_named_on_all_hosts():
    options = {"hosts": [0, 1, 3], "lost": "test/kind/0/2"}
    results, _ = on_hosts(
        4, lambda own: own.gather("kind", own.host, timeout_secs=60), **options
    )
    assert {type(each) for each in results} == {errors.RunError}
    assert all(" (kind) from these hosts: 2;" in str(each) for each in results)


def test_equal_values_of_all_hosts_take_as_many_bytes_as_one():
    sizes = []
    for num_hosts in (2, 80):
        _, store = on_hosts(
            num_hosts, lambda own: own.gather("kind", {"a": None}, timeout_secs=60)
        )
        sizes.append(len(store.values["test/kind/0/all"]))
    assert sizes[1] < sizes[0] + 4


@hypothesis.given(st.integers(1, 300), st.integers(1, 30))
def test_every_host_is_below_exactly_one_child_of_its_ancestors(num_hosts, fan_in):
    tree = HostTree(num_hosts=num_hosts, fan_in=fan_in)
    below = [host for child in tree.children(0) for host in tree.below(child)]
    assert [0, *below] == list(range(num_hosts)) == list(tree.below(0))
    sizes = [len(tree.below(child)) for child in tree.children(0)]
    assert len(sizes) <= fan_in
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    for host in range(1, num_hosts):
        *above, own = tree.way(host)
        assert own == tree.below(host)
        assert host in tree.children(above[-1].start)
        assert above == tree.way(above[-1].start)
    down = tree.in_order("down")
    assert tree.in_order("up") == down[::-1]
    for level, group in enumerate(down):
        assert {len(tree.way(host)) for host in group} == {level + 1}
    assert sorted(host for group in down for host in group) == list(range(num_hosts))


def test_what_fails_on_one_host_fails_on_all_and_later_calls_do_not():
    def drive(own):
        def work():
            if own.host == 1:
                raise errors.DataError("its file is gone")

        with pytest.raises(errors.ElasticCkptError) as failed:
            own.agreed("kind", work, timeout_secs=60)
        later = own.agreed("kind", lambda: own.host, timeout_secs=60)
        return type(failed.value), str(failed.value), later

    results, _ = on_hosts(3, drive)
    other = (errors.RunError, "host 1: its file is gone", [0, 1, 2])
    own = (errors.DataError, "its file is gone", [0, 1, 2])
    assert results == [other, own, other]
