import types

import pytest

from elastic_ckpt.core import addresses


@pytest.fixture
def reach(monkeypatch):
    """The address of this host where the coordinator has some address."""
    monkeypatch.delenv("POD_IP", raising=False)

    def find(coordinator, routes=None):
        state = types.SimpleNamespace(coordinator_address=coordinator)
        monkeypatch.setattr(addresses.distributed, "global_state", state)
        if routes is not None:
            monkeypatch.setattr(addresses, "toward", routes.__getitem__)
        return addresses.of_this_host()

    return find


def test_alone_it_is_loopback(reach):
    assert reach(None) == "127.0.0.1"


def test_it_is_the_address_that_reaches_the_coordinator(reach):
    assert reach("127.0.0.1:8080") == "127.0.0.1"
    assert reach("localhost:8080") in ("127.0.0.1", "::1")
    assert reach("10.0.0.1:8080", {"10.0.0.1": "10.0.0.7"}) == "10.0.0.7"
    assert reach("[fd00::1]:8080", {"fd00::1": "fd00::7"}) == "fd00::7"


def test_a_name_that_this_machine_alone_takes_for_loopback_is_not_announced(reach):
    routes = {"head": "127.0.1.1", "192.0.2.1": "10.0.0.7"}
    assert reach("head:8080", routes) == "10.0.0.7"


def test_in_a_pod_it_is_that_of_the_pod(reach, monkeypatch):
    assert reach("10.0.0.1:8080", {"10.0.0.1": "10.0.0.7"}) == "10.0.0.7"
    monkeypatch.setenv("POD_IP", "10.1.0.7")
    assert addresses.of_this_host() == addresses.of_the_head() == "10.1.0.7"
