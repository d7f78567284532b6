"""A follower of a world of several machines, of which some are gone."""

import os

import pytest

import elastic_ckpt as ec
from benchmarks import follow
from tests.multiprocess import machines, tier_worlds
from tests.multiprocess.test_elastic_ram import on, saved

HOSTS = 4
NEVER = 10**6

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


@pytest.fixture
def ram():
    with machines.Machines() as started:
        yield started


@pytest.mark.slow
def test_a_follower_reads_the_copies_of_agents_that_were_killed(ram, tmp_path):
    steps = str(tmp_path / "steps")
    options = {"slices": 2, "copies": 1, "persistent": steps, "every": NEVER}
    on(ram, range(HOSTS), saved([3, 4], sharded=True), tmp_path, **options)

    def followed(**more):
        return ec.watch_steps(
            steps, secret_file=os.path.join(ram.directory(0), "secret"), **more
        )

    # What one saw before, and another one that begins now, as agents are killed.
    before = followed(timeout_secs=0)
    assert next(before).step == 4
    ram.stop_agent(0)
    (step,) = followed(timeout_secs=0)
    assert step.step == 4
    tier_worlds.check(step.load(), 4)
    ram.stop_agent(1)
    assert list(before) == []
    # Of each slice a part is lost, whichever step it is of.
    ram.stop_agent(2)
    assert list(followed(timeout_secs=0)) == []


@pytest.mark.night
def test_the_suite_of_followers_runs_and_what_did_not_change_is_not_moved():
    figures = follow.measure(follow.SMALL)
    assert 1 < figures["follow_bytes_over_changed"].value < 1.1
    assert {"follow_slowdown_percent", "follow_lag_steps"} <= figures.keys()
