"""Values of all hosts reach all hosts, by few requests of each."""

from concurrent import futures

import hypothesis
import pytest
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.core.allgather import FAN_IN, Allgather, HostTree
from tests.core import thread_store


def gathered(num_hosts, value_of, *, absent=(), rounds=1, timeout_secs=60):
    """The result or error of each host that is not absent, and the store."""
    store = thread_store.Store()

    def drive(host):
        gather = Allgather(store, "test", host=host, num_hosts=num_hosts).gather
        for number in range(rounds):
            value = value_of(host)
            results = gather(f"kind-{number % 2}", value, timeout_secs=timeout_secs)
        return results

    present = [host for host in range(num_hosts) if host not in absent]
    with futures.ThreadPoolExecutor(num_hosts) as threads:
        doing = [threads.submit(drive, host) for host in present]
        return [each.exception() or each.result() for each in doing], store


@pytest.mark.parametrize("num_hosts", [1, FAN_IN + 2, 80])
def test_every_host_gets_the_value_of_each_host_by_few_requests(num_hosts):
    value_of = lambda host: {"host": host, "parity": host % 2}  # noqa: E731
    results, store = gathered(num_hosts, value_of, rounds=4)
    assert results == [list(map(value_of, range(num_hosts)))] * num_hosts
    # No host makes more in a larger world, and old values are removed.
    assert max(store.requests.values(), default=0) <= 4 * (FAN_IN + 2)
    assert sum(store.requests.values()) < 4 * 3 * num_hosts
    assert len({key.split("/")[2] for key in store.values}) <= 1


@pytest.mark.parametrize("order", ["up", "down"])
def test_each_host_waits_for_those_of_its_branch_that_come_before(order):
    num_hosts = FAN_IN * (FAN_IN + 1)
    store, begun, done = thread_store.Store(), {}, set()

    def drive(host):
        hosts = Allgather(store, "test", host=host, num_hosts=num_hosts)

        def part():
            begun[host] = set(done)
            done.add(host)
            return host

        return [
            hosts.run("kind", part, order=order, timeout_secs=60),
            hosts.run("kind", lambda: 0, order=order, timeout_secs=60),
        ]

    with futures.ThreadPoolExecutor(num_hosts) as threads:
        # Those that have to wait longest are asked first.
        hosts = range(num_hosts)[:: 1 if order == "up" else -1]
        asked = [threads.submit(drive, host) for host in hosts]
        results = [each.result() for each in asked]
    assert results == [[list(range(num_hosts)), [0] * num_hosts]] * num_hosts
    tree = HostTree(num_hosts=num_hosts)
    for host in range(num_hosts):
        parents = {part.start for part in tree.way(host)[-2:-1]}
        before = set(tree.below(host)[1:]) if order == "up" else parents
        assert before <= begun[host]
    assert {key.split("/")[2] for key in store.values} == {"1"}


def test_a_host_that_is_missing_is_named_on_all_hosts():
    results, _ = gathered(4, str, absent=[2], timeout_secs=0.01)
    assert {type(each) for each in results} == {errors.RunError}
    assert all(" waited for 2 (kind-0)" in str(each) for each in results)


def published(values):
    """What host 0 publishes of these values of hosts, and what each host takes."""
    results, store = gathered(len(values), values.__getitem__)
    assert results == [values] * len(values)
    (message,) = [store.values[key] for key in store.values if key.endswith("/all")]
    return message


def test_equal_values_of_all_hosts_take_as_many_bytes_as_one():
    answer = {"answer": None}
    assert len(published([answer] * 80)) < len(published([answer] * 2)) + 4


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.lists(st.integers(0, 3) | st.text(max_size=3), min_size=2))
def test_values_of_hosts_survive_their_encoding(values):
    published(values)


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
    store = thread_store.Store()

    def drive(host):
        hosts = Allgather(store, "test", host=host, num_hosts=3)

        def part():
            if host == 1:
                raise errors.DataError("its file is gone")
            return host

        with pytest.raises(errors.ElasticCkptError) as failed:
            hosts.agreed("kind", part, timeout_secs=60)
        later = hosts.agreed("kind", lambda: host, timeout_secs=60)
        return type(failed.value), str(failed.value), later

    with futures.ThreadPoolExecutor(3) as threads:
        results = list(threads.map(drive, range(3)))
    other = (errors.RunError, "host 1: its file is gone", [0, 1, 2])
    own = (errors.DataError, "its file is gone", [0, 1, 2])
    assert results == [other, own, other]
