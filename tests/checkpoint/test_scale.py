"""The suite `scale` drives a save and a restore of many hosts by the product's code."""

from benchmarks import scale
from elastic_ckpt.core import allgather


def test_the_messages_of_a_host_do_not_grow_with_the_hosts(monkeypatch):
    monkeypatch.setattr(scale, "_LEAVES", 1)
    # From 13 hosts on there is one with three children that all have three.
    monkeypatch.setitem(allgather.HostTree.__init__.__kwdefaults__, "fan_in", 3)
    few, more = scale._costs(20), scale._costs(40)
    for figure in ("messages_per_host", "restore_messages_per_host"):
        assert 0 < more[figure] == few[figure]
