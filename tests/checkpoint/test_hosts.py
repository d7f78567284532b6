"""Both kinds of hosts keep one contract: in every process, and under one controller."""

import contextlib
import copy
import dataclasses
import itertools
import pathlib
import re
from concurrent import futures
from unittest import mock

import numpy as np
import pytest
from elastic_ckpt_sidecar import remote_hosts

from benchmarks import scale
from elastic_ckpt.checkpoint import hosts, run_world
from elastic_ckpt.checkpoint.checkpointer import HostsCheckpointer
from elastic_ckpt.checkpoint.host import endpoint
from elastic_ckpt.checkpoint.host.copies import HostCopies
from elastic_ckpt.checkpoint.host.endpoint import HostEndpoint
from elastic_ckpt.checkpoint.host.exchange import Exchange
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.stages import Readiness
from elastic_ckpt.core import allgather, errors, events
from elastic_ckpt.data import compatibility
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import choices, find
from elastic_ckpt.tiers.source import ReadError
from elastic_ckpt.universal import loading
from tests.core import thread_store
from tests.processes import tier_worlds
from tests.sidecar import simulated_hosts

NUM_HOSTS = 2


def configs(machines):
    mesh = simulated_hosts.mesh_of(NUM_HOSTS)
    devices = simulated_hosts.hosts_of(mesh, NUM_HOSTS)
    return devices, simulated_hosts.choices_of(
        machines, devices, mesh, tier_worlds.tiers, numbers=range(NUM_HOSTS)
    )


@contextlib.contextmanager
def in_every_process(machines):
    """Runs work on the hosts of each of two drivers; returns what each returned."""
    store = thread_store.Store()
    drivers = [
        hosts.InEveryProcess(
            HostEndpoint(config),
            allgather.Allgather(store, "", host=config.number, num_hosts=NUM_HOSTS),
        )
        for config in configs(machines)[1]
    ]
    with futures.ThreadPoolExecutor(NUM_HOSTS) as threads:

        def drive(work):
            doing = [threads.submit(work, driver) for driver in drivers]
            return [each.result(60) for each in doing]

        yield drive
        drive(lambda driver: driver.close())


@contextlib.contextmanager
def under_one_controller(machines):
    """Runs work on the hosts of the only driver; returns what it returned."""
    with contextlib.closing(remote_hosts.RemoteHosts(*configs(machines))) as driver:
        yield lambda work: [work(driver)]


@pytest.fixture(params=[in_every_process, under_one_controller])
def drive(request):
    with simulated_hosts.Machines() as machines, request.param(machines) as driving:
        yield driving


def same(answers):
    """The answer of all drivers."""
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def test_answers_come_in_the_order_of_hosts_and_failures_reach_each_driver(drive):
    def introduce(driver):
        # No host has joined.
        with pytest.raises(errors.HostsFailedError, match="AssertionError"):
            driver.first(HostReader.complete_steps)
        return [each.machine for each in driver.all(HostEndpoint.introduce)]

    def fail(driver, call):
        with pytest.raises(errors.HostsFailedError) as raised:
            getattr(driver, call)(HostCopies.offer, StepId(9, "1"))
        return raised.value.of_host

    assert len(set(same(drive(introduce)))) == NUM_HOSTS
    drive(endpoint.join)
    notes = {"metrics": None, "custom_metadata": "{}", "kinds_digest": "0a"}
    flags = dict.fromkeys(("can_copy", "can_back_up", "is_time", "is_behind"), True)
    ready = Readiness(**notes, **flags)
    shared = drive(lambda driver: driver.gather("ready", ready))
    assert same(shared) == [ready] * len(shared)
    for call, failed in (("all", [0, 1]), ("first", [0])):
        of_host = same(drive(lambda driver, call=call: fail(driver, call)))
        assert sorted(of_host) == failed
        assert all("step 9" in why for why in of_host.values())


@pytest.mark.parametrize("way", [in_every_process, under_one_controller])
def test_hosts_that_differ_are_told_how_before_one_writes(way, monkeypatch):
    make, number = simulated_hosts.choices_of, itertools.count()
    chosen = choices.Chosen.from_choices([choices.Local("/other", every=2)])

    def choices_of(*args, **options):
        first, other = make(*args, **options)
        return [first, dataclasses.replace(other, run="two", chosen=chosen)]

    def join(driver):
        with pytest.raises(errors.ConfigError) as raised:
            endpoint.join(driver)
        told = re.split("differ: |; ", re.sub(r" \(.*?\)|\. .*", "", str(raised.value)))
        assert told[1] == "Local.every is 1 on host 0, 2 on host 1"
        assert re.fullmatch(r"jaxlib is \d on host 0, \d on host 1", told[2])
        assert told[3] == "the run's name is run on host 0, two on host 1"
        assert told[4] == "tiers is Local + Peers on host 0, Local on host 1"

    monkeypatch.setattr(simulated_hosts, "choices_of", choices_of)
    of_host = mock.Mock(side_effect=lambda: {"jaxlib": str(next(number))})
    monkeypatch.setattr(compatibility, "versions", of_host)
    with simulated_hosts.Machines() as machines, way(machines) as drive:
        drive(join)
        assert not list(pathlib.Path(machines.root).glob("*/hosts"))


def test_hosts_share_all_settings_of_tiers_but_those_of_their_machine():
    tiers = [choices.Local("/a"), choices.Peers(), choices.Persistent("/b", every=1)]
    known, of_machine = choices.Chosen.from_choices(tiers), []
    for tier, name in [(each, name) for each in tiers for name in vars(each)]:
        other = copy.copy(tier)
        vars(other)[name] = "another"
        changed = dataclasses.replace(known, **{type(tier).__name__.lower(): other})
        of_machine += [name] * (changed.shared == known.shared)
    assert " ".join(of_machine) == (
        "directory limit_bytes pinned_bytes"
        " domains interface port known secret_file max_bytes_per_sec"
    )


@pytest.mark.parametrize("lost", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hosts_read_by_the_table_of_host_0_or_ask_all(drive, monkeypatch, lost):
    values, read_alone, of_save = np.arange(6.0), [], find.of_save

    def noted(tiers, step_id):
        read_alone.append(step_id.step)
        return of_save(tiers, step_id)

    def refuse(*_):
        raise ReadError("was not passed on")

    def save_and_load(driver):
        with HostsCheckpointer(
            driver,
            choices.Chosen.from_choices(tier_worlds.tiers("/nowhere")),
            run="run",
            found=None,
            relayout=loading.relayout,
            world=run_world.ALONE,
            emit=events.nobody,
            context=None,
        ) as ours:
            assert ours.save(1, {"n": values})
            return ours.load(1)["n"]

    monkeypatch.setattr(find, "of_save", noted)
    if lost:
        monkeypatch.setattr(Exchange, "take", refuse)
    for loaded in drive(save_and_load):
        np.testing.assert_array_equal(loaded, values)
    assert set(read_alone) == {1} if lost else not read_alone


def test_the_messages_of_a_host_do_not_grow_with_the_hosts(monkeypatch):
    monkeypatch.setattr(scale, "_LEAVES", 1)
    # From 13 hosts on there is one with three children that all have three.
    monkeypatch.setitem(allgather.HostTree.__init__.__kwdefaults__, "fan_in", 3)
    few, more = scale._costs(20), scale._costs(40)
    for figure in ("messages_per_host", "restore_messages_per_host"):
        assert 0 < more[figure] == few[figure]
