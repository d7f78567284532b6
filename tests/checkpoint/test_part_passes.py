"""Parts reach all hosts though the agents of some machines do not answer."""

import collections
import dataclasses
import functools
import json
import types

import numpy as np
import pytest

from elastic_ckpt.checkpoint import part_passes
from elastic_ckpt.checkpoint.host import part_exchange
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import calls, codec
from elastic_ckpt.core.host_tree import FAN_IN, HostTree
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import PartTable
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.source import ReadError
from tests.checkpoint.host.post_office import PostOffice
from tests.tiers import saved_worlds

# Two levels below host 0, and a few hosts on a third.
NUM_HOSTS = FAN_IN * (FAN_IN + 1) + FAN_IN


class Box:
    """The mail of a host, which cannot read what some others have left."""

    def __init__(self, office, host, silent):
        self._box = office.box(host)
        self._host = host
        self._silent = silent
        self._delivered = {}
        self.post, self.remove = self._box.post, self._box.remove

    def read(self, host, name):
        if (host, name) in self._delivered:
            return self._delivered.pop((host, name))
        if host in self._silent and host != self._host:
            raise ReadError(f"cannot be read: host {host} is silent")
        return self._box.read(host, name)

    def deliver(self, host, name, content):
        self._delivered[host, name] = content


class World(HostWorld):
    """A host that takes part in exchanges and can do nothing else."""

    def __init__(self, number, hosts, mail):
        self.number, self.hosts, self.mail = number, hosts, mail
        self.disk = types.SimpleNamespace(machine=hosts[number].machine)

    def _serve_beside(self):
        # Another host of the machine would have to start an agent.
        return None


class Driver:
    """Drives hosts in the order of each call; counts the calls."""

    def __init__(self, worlds):
        self._worlds = worlds
        self.num_hosts = len(worlds)
        self.calls = collections.Counter()

    def all(self, method, *args):
        call, answers = calls.of(method), {}
        self.calls[method.__name__] += 1
        for group in HostTree(num_hosts=self.num_hosts).in_order(call.order):
            for number in group:
                sent = json.loads(json.dumps(call.encode(call.bind(*args))))
                _, arguments = calls.decode(sent)
                host = types.SimpleNamespace(part=lambda _, n=number: self._worlds[n])
                answer = json.dumps(codec.encode(call.run(host, arguments)))
                answers[number] = call.decode_answer(json.loads(answer))
        return [answers[number] for number in range(self.num_hosts)]


class Offering(World):
    """A host that offers its number as a step."""

    @calls.call(order="up")
    def offer_number(self) -> tuple[part_exchange.Letter, ...]:
        """Offers a step."""
        message = PartMessage(saves=(StepId(self.number, "0"),))
        return self.exchanges["copies"].offer(message)


def exchanged(silent):
    """The steps that reach host 0, the parts of each host, and the driver."""
    office = PostOffice()
    hosts = [saved_worlds.host(number, 1, NUM_HOSTS) for number in range(NUM_HOSTS)]
    worlds = [
        Offering(number, hosts, Box(office, number, silent))
        for number in range(NUM_HOSTS)
    ]
    driver = Driver(worlds)
    merged = []

    def decide():
        exchange = worlds[0].exchanges["copies"]
        merged.append(exchange.merged())
        exchange.deal([one_row_each(hosts)])

    offer = functools.partial(driver.all, Offering.offer_number)
    part_passes.exchanged(driver, "copies", offer=offer, decide=decide)
    assert not merged[0].problems
    assert not merged[0].is_partial
    received = [world.exchanges["copies"].received() for world in worlds]
    return {each.step for each in merged[0].saves}, received, driver


def one_row_each(hosts):
    """A table of a row for each host, at host 0."""
    rows = saved_worlds.grid([len(hosts), 2], [len(hosts), 1])
    whole = saved_worlds.contents({"w": [len(hosts), 2]})
    offer = saved_worlds.offer(hosts[0], whole, [(0, row) for row in rows])
    table = PartTable.from_offer(offer)
    return dataclasses.replace(table, target=np.arange(len(hosts), dtype=np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("silent", [[], [1], [2, 3], range(NUM_HOSTS)], ids=str)
def test_parts_that_agents_do_not_send_come_from_their_hosts(silent):
    steps, received, driver = exchanged(silent)
    assert steps == set(range(NUM_HOSTS))
    boxes = [table.boxes[0].start for (table,) in received]
    assert boxes == [(number, 0) for number in range(NUM_HOSTS)]
    # A pass is repeated for each level of the tree, at most.
    assert driver.calls["forward_mail"] <= 2 * HostTree(num_hosts=NUM_HOSTS).depth(0)
    assert driver.calls["pass_parts"] == 1 or silent
