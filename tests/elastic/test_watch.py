"""Hosts that hang are found by what they do not send."""

import pytest

from elastic_ckpt.elastic import watch


@pytest.fixture
def limits():
    return watch.Limits(most_secs=600.0, heartbeat_secs=20.0)


class World:
    """Three hosts whose clocks, heartbeats and phases the test moves."""

    def __init__(self, limits):
        self.secs = 1000.0
        self.watch = watch.Watch(limits, 3, now_secs=self.secs)

    def passes(self, secs, hosts=(0, 1, 2)):
        self.secs += secs
        for host in hosts:
            self.watch.heartbeat(host, now_secs=self.secs)

    def begins(self, phase, hosts=(0, 1, 2)):
        for host in hosts:
            self.watch.begin(host, phase, now_secs=self.secs)

    @property
    def hang(self):
        return self.watch.hang(now_secs=self.secs)


@pytest.fixture
def world(limits):
    return World(limits)


def test_a_host_without_heartbeats_hangs_in_any_phase(world):
    world.passes(1)
    for _ in range(20):
        world.passes(1, hosts=(0, 2))
    assert world.hang is None
    world.passes(1, hosts=(0, 2))
    assert world.hang.hosts == {1}
    assert world.hang.why == "no heartbeat for 21 s, in ['start']"


def test_a_host_that_has_not_begun_to_send_heartbeats_has_the_time_of_its_phase(world):
    for _ in range(600):
        world.passes(1, hosts=(0, 2))
    assert world.hang is None
    world.passes(1, hosts=(0, 2))
    assert "phase 'start'" in world.hang.why


def test_a_phase_that_is_not_known_has_the_whole_bound(world):
    world.begins("compile")
    world.passes(600)
    assert world.hang is None
    world.passes(1)
    assert world.hang.why == "hangs in phase 'compile' for 601 s"


@pytest.mark.parametrize(
    ("step_secs", "limit_secs"), [(0.1, 60), (12, 120), (100, 600)]
)
def test_a_phase_that_is_known_has_ten_times_its_longest(world, step_secs, limit_secs):
    for _ in range(3):
        world.begins("step")
        world.passes(step_secs)
    world.begins("step")
    world.passes(limit_secs - 0.5)
    assert world.hang is None
    world.passes(1)
    assert "phase 'step'" in world.hang.why


def test_the_host_that_is_behind_is_the_culprit(world):
    world.begins("step")
    world.passes(1)
    world.begins("step", hosts=(0, 2))
    world.passes(601)
    assert world.hang.hosts == {1}


def test_hosts_that_are_equally_far_are_no_culprits(world):
    world.begins("step")
    world.passes(601)
    assert world.hang.hosts == frozenset()


@pytest.mark.parametrize(
    ("joined", "culprits"),
    [((0, 1), {2}), ((0, 2), {1}), ((0,), {0}), ((0, 1, 2), set())],
)
def test_a_host_that_does_not_reach_host_0_is_lost_unless_most_do_not(
    world, joined, culprits
):
    world.begins(watch.REACH)
    world.begins(watch.JOIN, hosts=joined)
    world.passes(601)
    assert world.hang.hosts == culprits


@pytest.mark.parametrize("joined", [(0, 1), (0,)])
def test_once_host_0_waits_little_time_is_needed_to_reach_it(world, joined):
    world.begins(watch.REACH, hosts=(1, 2))
    world.passes(100)
    world.begins(watch.REACH, hosts=(0,))
    world.begins(watch.JOIN, hosts=joined)
    # As long as host 0 had not begun to listen, nobody could reach it.
    world.passes(30)
    assert world.hang is None
    world.passes(1)
    assert world.hang.hosts == ({2} if len(joined) == 2 else {0})


def test_a_host_that_reaches_host_0_slowly_has_as_long_as_for_a_heartbeat():
    world = World(watch.Limits(most_secs=600.0, heartbeat_secs=90.0))
    world.begins(watch.REACH)
    world.begins(watch.JOIN, hosts=(0, 1))
    world.passes(90)
    assert world.hang is None
    world.passes(1)
    assert world.hang.why == "hangs in phase 'reach' for 91 s"


def test_hosts_that_were_prepared_have_all_the_time_when_their_world_starts(world):
    world.begins(watch.REACH)
    world.begins(watch.JOIN, hosts=(0, 1))
    world.passes(300)
    world.watch.start_again(now_secs=world.secs)
    world.passes(30)
    assert world.hang is None
    world.passes(1)
    assert world.hang.hosts == {2}


def test_hosts_that_have_reached_host_0_wait_for_one_that_has_not_started(world):
    world.begins(watch.REACH, hosts=(0, 1))
    world.begins(watch.JOIN, hosts=(0, 1))
    world.passes(600)
    assert world.hang is None
    world.passes(1)
    assert world.hang.hosts == {2}


def test_a_host_that_has_not_started_is_the_culprit_if_the_others_wait_for_it(world):
    world.begins(watch.REACH, hosts=(1, 2))
    world.passes(601)
    assert world.hang.hosts == {0}


def test_a_host_that_compiles_is_not_judged_by_one_that_had_the_program(world):
    # A warm cache on host 0.
    world.begins("compile")
    world.passes(1)
    world.begins(watch.TRAIN, hosts=(0,))
    world.passes(598)
    assert world.hang is None
    world.passes(3)
    assert world.hang.hosts == {1, 2}
    assert world.hang.why == "hangs in phase 'compile' for 602 s"


@pytest.mark.parametrize("phase", ["start", "prepare", "restore", "compile", "step"])
def test_a_host_is_judged_by_no_other_host_and_no_other_world(limits, phase):
    first = World(limits)
    first.begins(phase)
    first.passes(1)
    first.begins("evaluate")
    # Its slice may have lost its memory, its machine may be new.
    second = World(limits)
    second.begins(phase)
    second.passes(1)
    second.begins("evaluate", hosts=(0,))
    second.passes(598)
    assert second.hang is None
    second.passes(3)
    assert second.hang.hosts == {1, 2}


def test_hosts_that_wait_in_a_step_have_the_time_of_the_one_that_compiles(world):
    for _ in range(3):
        world.begins("step")
        world.passes(1)
    world.begins("compile", hosts=(1,))
    world.begins("step", hosts=(0, 2))
    world.passes(599)
    assert world.hang is None
    world.passes(2)
    assert world.hang is not None


@pytest.mark.parametrize("phase", ["compile", "restore"])
def test_a_program_is_not_judged_by_another_one_nor_storage_by_memory(world, phase):
    world.begins(phase)
    world.passes(1)
    world.begins("step")
    world.passes(1)
    world.begins(phase)
    world.passes(599)
    assert world.hang is None


def test_nothing_is_learned_from_a_training_that_names_no_phases(world):
    for _ in range(3):
        world.begins(watch.TRAIN)
        world.passes(1)
    world.begins(watch.TRAIN)
    world.passes(600)
    assert world.hang is None
    world.passes(1)
    assert "phase 'train'" in world.hang.why


def test_uploads_at_the_end_may_take_any_time(world):
    world.begins(watch.CLOSE)
    world.passes(100_000)
    assert world.hang is None


def test_a_host_that_has_ended_is_not_waited_for(world):
    world.begins("step")
    world.passes(1)
    for host in range(3):
        world.watch.end(host)
    world.passes(1000, hosts=())
    assert world.hang is None


def test_time_in_which_the_watching_process_stood_still_does_not_count(world):
    world.begins("step")
    world.passes(1)
    world.watch.look(now_secs=world.secs)
    world.passes(900, hosts=())
    # The message of one host is received first.
    world.passes(0, hosts=(0,))
    world.watch.look(now_secs=world.secs)
    assert world.hang is None
    for _ in range(19):
        world.passes(1, hosts=(0, 2))
        world.watch.look(now_secs=world.secs)
    assert world.hang is None
    world.passes(1, hosts=(0, 2))
    world.watch.look(now_secs=world.secs)
    assert world.hang.hosts == {1}
