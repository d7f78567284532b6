"""What all hosts have reaches host 0, and what it gives reaches all of them."""

import collections
import functools
import itertools

import pytest

from elastic_ckpt.checkpoint.host.exchange import GIVEN, Exchange, Report
from elastic_ckpt.core import checked_json
from elastic_ckpt.core.allgather import FAN_IN, HostTree
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.manifest import Manifest
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.tiers.source import ReadError
from tests.tiers import saved_worlds

# Two levels below host 0, and a few hosts on a third.
LARGE = FAN_IN * (FAN_IN + 1) + FAN_IN


class Posted(Exchange):
    """That of a host; `office` has the messages of all, `num` counts each host's.

    A message counts at the host that leaves it for others, and at each that reads it.
    """

    def __init__(self, office, num, host, num_hosts, silent):
        super().__init__(None, hosts=range(num_hosts), number=host, endpoint=None)
        self._office, self._num, self._host = office, num, host
        self._silent = silent

    def post(self, name, content):
        self._office[self._host, name] = content

    def read(self, host, name):
        self._num.update([self._host, host])
        if host in self._silent:
            raise ReadError("cannot be read: timed out")
        return self._office[host, name]

    def remove(self, prefix):
        for host, name in list(self._office):
            if host == self._host and name.startswith(prefix):
                del self._office[host, name]


@functools.cache
def saved_by(num_hosts):
    """Hosts that have one row of a leaf each, and a file."""
    whole = saved_worlds.contents({"w": [num_hosts, 2]}, files=num_hosts)
    rows = saved_worlds.grid([num_hosts, 2], [num_hosts, 1])
    return [
        saved_worlds.saved_by(
            saved_worlds.host(number, 4, num_hosts),
            whole,
            [(0, rows[number]), saved_worlds.file_of(whole, number)],
        )
        for number in range(num_hosts)
    ]


def exchanges(num_hosts, silent=()):
    """The exchange of each host, after all have offered, and the mail."""
    office, num = {}, collections.Counter()
    made = [Posted(office, num, host, num_hosts, silent) for host in range(num_hosts)]
    for host in in_order(num_hosts, "up"):
        each = saved_by(num_hosts)[host]
        made[host].offer(Report(manifests=[each], saves=[each.step_id]))
    return made, office, num


def in_order(num_hosts, order):
    return itertools.chain.from_iterable(HostTree(num_hosts=num_hosts).in_order(order))


@pytest.mark.parametrize("num_hosts", [1, 2, FAN_IN + 2, LARGE])
def test_host_0_has_what_all_have_and_all_have_what_it_gives(num_hosts):
    made, office, num = exchanges(num_hosts)
    merged = made[0].merged
    (whole,) = merged.manifests
    assert StepTable([whole]).complete
    assert merged.saves == [(30, "0")]
    assert not merged.problems
    made[0].post(GIVEN, whole.to_bytes())
    for host in in_order(num_hosts, "down"):
        if host:
            given = Manifest.parse(made[host].take(GIVEN))
            assert sorted(given.rows()) == sorted(
                row for each in saved_by(num_hosts) for row in each.rows()
            )
    # No host passes more messages in a larger world, and none are left.
    assert max(num.values(), default=0) <= 2 * FAN_IN + 2
    assert sum(num.values()) <= 2 * 2 * num_hosts
    for each in made:
        each.end()
    assert not office


@pytest.mark.parametrize("silent", [1, 2, LARGE - 1])
def test_of_a_silent_host_only_its_own_parts_are_missing(silent):
    made, _, _ = exchanges(LARGE, silent=[silent])
    (whole,) = made[0].merged.manifests
    others = {each.host.id for n, each in enumerate(saved_by(LARGE)) if n != silent}
    assert {holder.host.id for holder in whole.holders} == others
    (problem,) = made[0].merged.problems
    assert problem.startswith(f"the parts of host {silent}: the list cannot be read")
    made[0].post(GIVEN, b"table")
    for host in in_order(LARGE, "down"):
        if host:
            assert made[host].take(GIVEN) == b"table"


def test_a_report_that_was_altered_is_refused():
    content = Report(manifests=saved_by(2), problems=["lost"]).to_bytes()
    assert Report.parse(content).problems == ["lost"]
    for spoilt in (content[:-1], b"", content[:40] + b"?" + content[41:]):
        with pytest.raises(checked_json.UnreadableError):
            Report.parse(spoilt)


def test_exchanges_of_one_host_do_not_disturb_each_other(tmp_path):
    disk = ram_disk.RamDisk(tmp_path, run="run")
    host = manifest.Host(id=disk.host_id(0), number=0, domains={})
    posting, removing = (
        Exchange(disk, hosts=[host], number=0, endpoint=None) for _ in range(2)
    )
    posting.post("copies-offered", b"1")
    removing.remove("backup-")
    assert posting.read(0, "copies-offered") == b"1"
    posting.remove("copies-")
    with pytest.raises(ReadError, match="is missing"):
        posting.read(0, "copies-offered")
    # The directory stays: another exchange may be about to post there.
    assert list((tmp_path / "hosts" / "0" / ram_disk.MESSAGES).iterdir()) == []
