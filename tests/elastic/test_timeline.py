"""The seconds of a change are divided among its phases."""

import pytest

from elastic_ckpt.elastic import timeline


class Clock:
    def __init__(self):
        self.secs = 100.0

    def __call__(self):
        return self.secs


class Line(timeline.Timeline):
    """A timeline with a clock that the test moves, and what it has emitted."""

    def __init__(self):
        self.clock, self.emitted = Clock(), []
        super().__init__(
            lambda name, **fields: self.emitted.append((name, fields)),
            clock=self.clock,
        )

    @property
    def recovered(self):
        (recovered,) = [each for name, each in self.emitted if name == "recovered"]
        return recovered


@pytest.fixture
def line():
    return Line()


STARTED = {"run": "r", "hosts": 3, "slices": 3, "devices": 6, "steps": 40}
STEP = {"steps": 40, "loss": 1.0, "secs": 0.1, "tokens": 9, "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("program", "secs"), [("compiled", 2.0), ("executable_loaded", 0.25)]
)
def test_each_phase_has_its_seconds(line, program, secs):
    line("world_started", world=1, slices=[0, 1, 2, 3], spares=[])
    line("step", step=12, **STEP)
    line.begin(since_secs=99.5)
    for passed, name, fields in (
        (0.125, "world_started", {"world": 2, "slices": [0, 2, 3], "spares": []}),
        (1.0, "world_joined", {"world": 2}),
        (0.5, "run_started", {"start_step": 10, **STARTED}),
        (0.25, "restored_from", {"step": 10}),
        (secs, program, {"step": 11, "secs": secs}),
        (0.0625, "step", {"step": 11, **STEP}),
    ):
        line.clock.secs += passed
        line(name, **fields)
    line("step", step=12, **STEP)
    assert line.recovered == {
        "world": 2,
        "steps_lost": 2,
        "secs": 0.5 + 0.125 + 1.0 + 0.5 + 0.25 + secs + 0.0625,
        "end_secs": 0.5,
        "decide_secs": 0.125,
        "start_secs": 1.0,
        "prepare_secs": 0.5,
        "restore_secs": 0.25,
        "compile_secs": secs,
        "step_secs": 0.0625,
    }
    # The event comes at once, before the next step.
    assert [name for name, _ in line.emitted][-2:] == ["recovered", "step"]


def test_a_planned_change_begins_when_hosts_are_asked_to_leave(line):
    line("world_started", world=1, slices=[0, 1], spares=[])
    line.clock.secs += 10.0
    line("world_leaving", slices=[0])
    line.clock.secs += 0.5
    line.begin()
    line.clock.secs += 0.25
    line("world_started", world=2, slices=[0], spares=[])
    line("step", step=1, **STEP)
    assert (line.recovered["end_secs"], line.recovered["decide_secs"]) == (0.5, 0.25)


def test_a_first_world_recovers_from_nothing(line):
    line("world_started", world=1, slices=[0], spares=[])
    line("step", step=1, **STEP)
    assert [name for name, _ in line.emitted] == ["world_started", "step"]


def test_the_steps_of_a_loop_of_ones_own_are_counted_from_the_one_restored(line):
    line("world_started", world=1, slices=[0, 1], spares=[])
    line("step_done", step=12)
    line.begin(since_secs=0.0)
    line("world_started", world=2, slices=[0], spares=[])
    line("restored_from", step=10)
    line("step_done", step=11)
    assert line.recovered["steps_lost"] == 2


def test_a_run_that_is_finished_took_the_time_of_all_its_worlds(line):
    line("world_started", world=1, slices=[0, 1], spares=[])
    line.clock.secs += 45.0
    line.begin()
    line("world_started", world=2, slices=[0], spares=[])
    line.clock.secs += 15.0
    # As the last world counts it.
    line("run_finished", step=150, secs=14.8)
    assert line.emitted[-1] == ("run_finished", {"step": 150, "secs": 60.0})
