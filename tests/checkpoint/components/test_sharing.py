"""Names, owners and writers of states, as functions of hosts and meshes."""

import itertools

import numpy as np
import pytest

from elastic_ckpt.checkpoint.components import component as sharing

# Eight hosts of one device each.
CUBE = np.arange(8).reshape(2, 2, 2)
AXES = ("data", "model", "pipe")


def of_hosts(make, hosts):
    """The sharing as each host has it; one host alone writes each state."""
    each = [make(host) for host in hosts]
    writers = [one.name for one in each if one.is_writer]
    assert sorted(writers) == sorted(set(each[0].names))
    assert len({one.names for one in each}) == 1
    return each


def test_one_state_of_all_is_written_by_host_0():
    each = of_hosts(
        lambda host: sharing.of_nodes("replicated", "aaa", host=host), range(3)
    )
    assert [one.name for one in each] == ["global"] * 3
    assert [one.is_writer for one in each] == [True, False, False]


def test_each_rank_has_its_own():
    each = of_hosts(
        lambda host: sharing.of_nodes("per_host", range(3), host=host), range(3)
    )
    assert [one.name for one in each] == ["rank-00000", "rank-00001", "rank-00002"]


@pytest.mark.parametrize(
    ("nodes", "names", "writers"),
    [
        ("aabb", [0, 0, 1, 1], [0, 2]),
        ("abab", [0, 1, 0, 1], [0, 1]),
        ("bbba", [0, 0, 0, 1], [0, 3]),
        ("a", [0], [0]),
    ],
)
def test_nodes_are_numbered_by_their_first_host(nodes, names, writers):
    hosts = range(len(nodes))
    each = of_hosts(lambda host: sharing.of_nodes("per_node", nodes, host=host), hosts)
    assert [one.name for one in each] == [f"node-{number:05d}" for number in names]
    assert [host for host in hosts if each[host].is_writer] == writers


@pytest.mark.parametrize(
    "axes",
    [axes for count in (1, 2, 3) for axes in itertools.combinations(AXES, count)],
)
def test_hosts_that_differ_only_along_the_axes_share_a_state(axes):
    def make(host):
        return sharing.per_group(CUBE, AXES, axes, host=host)

    each = of_hosts(make, range(8))
    coordinates = dict(enumerate(itertools.product(range(2), repeat=3)))
    for one, other in itertools.combinations(range(8), 2):
        differs = {
            axis
            for axis, a, b in zip(
                AXES, coordinates[one], coordinates[other], strict=True
            )
            if a != b
        }
        assert (each[one].name == each[other].name) == (differs <= set(axes))
    for one in each:
        members = [host for host in range(8) if each[host].name == one.name]
        assert [host for host in members if each[host].is_writer] == members[:1]


def test_groups_are_named_by_the_other_axes():
    names = sharing.per_group(CUBE, AXES, ["data"], host=0).names
    assert names == tuple(
        f"group-model-{m}-pipe-{p}" for m in range(2) for p in range(2)
    )
    assert sharing.per_group(CUBE, AXES, AXES, host=5).names == ("group",)


def test_a_group_is_found_by_its_place_after_hosts_were_renumbered():
    order = np.array([3, 1, 7, 5, 0, 2, 6, 4]).reshape(2, 2, 2)
    for host in range(8):
        moved = sharing.per_group(order, AXES, ["data", "pipe"], host=host)
        ((_, model, _),) = np.argwhere(order == host)
        assert moved.name == f"group-model-{model}"


def test_axes_of_size_1_and_odd_names_do_not_matter():
    hosts = np.arange(2).reshape(2, 1, 1)
    sharing_of_host = sharing.per_group(hosts, ("a/b", "x", "y"), ["x"], host=1)
    assert sharing_of_host.names == ("group-a%2Fb-0", "group-a%2Fb-1")
    assert sharing_of_host.name == "group-a%2Fb-1"


def test_a_host_of_several_devices_is_in_one_group():
    # Four hosts of two devices each, which differ along the last axis.
    hosts = np.arange(8).reshape(2, 2, 2) // 2
    assert (
        sharing.per_group(hosts, AXES, ["pipe"], host=3).name == "group-data-1-model-1"
    )
