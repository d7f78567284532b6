"""What all hosts have reaches host 0, and what it gives reaches all of them."""

import collections
import itertools
import types

import pytest

from elastic_ckpt.checkpoint.host.exchange import GIVEN, Exchange, Report
from elastic_ckpt.core.allgather import FAN_IN, HostTree
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.tiers.source import ReadError

# Two levels below host 0, and a few hosts on a third.
LARGE = FAN_IN * (FAN_IN + 1) + FAN_IN


class Posted(Exchange):
    """Messages are in `mail`, which counts those that each host leaves or reads."""

    def __init__(self, mail, host, num_hosts):
        super().__init__(None, hosts=range(num_hosts), number=host, endpoint=None)
        self._mail, self._host = mail, host

    def post(self, name, content):
        self._mail.office[self._host, name] = content

    def read(self, host, name):
        self._mail.num.update([self._host, host])
        if host == self._mail.bad.get("silent"):
            raise ReadError("cannot be read: timed out")
        content = self._mail.office[host, name]
        return content[:-1] if host == self._mail.bad.get("altered") else content

    def remove(self, prefix):
        for host, name in list(self._mail.office):
            if host == self._host and name.startswith(prefix):
                del self._mail.office[host, name]


def exchanged(num_hosts, **bad):
    """What host 0 has of all hosts, which get a table then, and the mail."""
    mail = types.SimpleNamespace(office={}, num=collections.Counter(), bad=bad)
    made = [Posted(mail, host, num_hosts) for host in range(num_hosts)]
    tree = HostTree(num_hosts=num_hosts)
    for host in itertools.chain.from_iterable(tree.in_order("up")):
        made[host].offer(Report(saves=[StepId(host, "0")]))
    merged = made[0].merged
    made[0].post(GIVEN, b"table")
    for host in itertools.chain.from_iterable(tree.in_order("down")):
        assert host == 0 or made[host].take(GIVEN) == b"table"
    for each in made:
        each.end()
    return merged, mail


@pytest.mark.parametrize("num_hosts", [1, 2, FAN_IN + 2, LARGE])
def test_host_0_has_what_all_have_and_all_have_what_it_gives(num_hosts):
    merged, mail = exchanged(num_hosts)
    assert merged.saves == [(host, "0") for host in range(num_hosts)]
    assert not merged.problems
    # No host passes more messages in a larger world, and none are left.
    assert max(mail.num.values(), default=0) <= 2 * FAN_IN + 2
    assert sum(mail.num.values()) <= 2 * 2 * num_hosts
    assert not mail.office


@pytest.mark.parametrize("silent", [1, 2])
def test_of_a_silent_host_or_an_altered_list_only_its_own_parts_are_missing(silent):
    merged, _ = exchanged(LARGE, silent=silent, altered=LARGE - 1)
    others = {*range(LARGE - 1)} - {silent}
    assert merged.saves == [(host, "0") for host in sorted(others)]
    first, second = sorted(merged.problems, key=len)
    assert first == f"the list of host {silent}'s parts cannot be read: timed out"
    assert f"host {LARGE - 1}'s parts was truncated or altered" in second


def test_exchanges_of_one_host_do_not_disturb_each_other(tmp_path):
    disk = ram_disk.RamDisk(tmp_path, run="run")
    hosts = [Host(id=disk.host_id(0), number=0, domains={})]
    posting = Exchange(disk, hosts=hosts, number=0, endpoint=None)
    removing = Exchange(disk, hosts=hosts, number=0, endpoint=None)
    posting.post("copies-offered", b"1")
    removing.remove("backup-")
    assert posting.read(0, "copies-offered") == b"1"
    posting.remove("copies-")
    with pytest.raises(ReadError, match="is missing"):
        posting.read(0, "copies-offered")
    # The directory stays: another exchange may be about to post there.
    assert list((tmp_path / "hosts" / "0" / ram_disk.MESSAGES).iterdir()) == []
