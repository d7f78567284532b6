"""`kill -9` of one host and of all, at points of a save and a restore, and at random.

`tests/model` enumerates all points in a simulation; these are of real processes.
"""

import functools
import os
import random
import shutil
import signal
import threading
import time

import pytest

from elastic_ckpt import frontend
from elastic_ckpt.core import errors, events, topology
from elastic_ckpt.elastic import host as host_process
from elastic_ckpt.training import schema
from tests import documents, host_worlds, runs
from tests.processes import claims, great_runs, killed_tiers, killed_world, tier_worlds
from tests.recorded_events import RecordedEvents

# Of each life: the point and its occurrence, who is killed, and the steps that are
# complete then. Each life ends in its second save, but one in its first.
LIVES = [
    ("before_the_state_is_taken", 2, "all", [2]),
    ("with_the_cursors_half_written", 1, 1, [2]),
    ("before_the_step_is_committed", 2, 0, [2, 4]),
    ("after_the_step_is_committed", 2, "all", [2, 4, 6, 8]),
]


def die_again_and_again(run):
    run.saved = []
    for point, occurrence, victim, complete in LIVES:
        settings = [str(run.config), "steps=1000"]
        killed = runs.forked(
            killed_world.train, point, occurrence, victim, settings, leads_group=True
        )
        if victim == "all":
            assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
        else:
            assert f"host {victim} failed: killed by SIGKILL" in killed.stderr
            assert "the same command continues it from the newest" in killed.stdout
        assert runs.saved_steps(run.path) == complete, point
        run.output += killed.stdout
    # At a random moment; then other numbers of hosts.
    run.train_until("tiny:", "hosts=1", "slices=1", act=kill_soon, leads_group=True)
    last = runs.saved_steps(run.path)[-1] + 4
    run.train("hosts=3", "slices=3", f"steps={last}")


def kill_soon(started):
    time.sleep(random.Random(5).uniform(0, 1))
    os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.slow
class TestKilled(claims.Claims):
    """A packed mixture of Parquet files, with steps in storage alone."""

    scenario = great_runs.Scenario(
        drive=die_again_and_again,
        memory=False,
        from_memory=False,
        training=great_runs.mixture,
        # A save has ended before the next one begins.
        settings={"checkpoint_period": 2, "async_checkpointing": False},
        tells=["slice_lost 1", "slice_lost 0"],
        verdicts=["host_killed", "host_killed"],
    )

    def test_a_run_without_its_host_ends_and_says_why(self, run):
        assert [each["why"] for each in run.events("run_failed")] == [
            f"host {host} failed: killed by SIGKILL" for host in (1, 0)
        ]

    def test_the_newest_complete_step_is_continued_and_the_other_named(self, run):
        assert run.output.count("tiny: from step 2 to step ") == 2
        for step in (4, 8):
            assert f"tiny: from step {step} to step " in run.output
        assert run.output.count("was interrupted, so the step is skipped") >= 1

    def test_documents_that_the_audit_names_make_the_batches(self, run):
        steps = range(1, len(run.records), 3)
        assert documents.assert_named(run.path, steps, length=32) >= len(steps)


class Lives:
    """Worlds on four machines, each one after the other was killed."""

    def __init__(self, ram, path):
        self._ram, self._path = ram, path
        self._numbers = list(range(4))
        self._expected = ()

    def end_in(self, phase, *, everybody):
        """A world finds what the one before left, and is killed in a phase."""
        point = killed_tiers.POINTS[phase]
        context = f"{phase}, on the machines {self._numbers}"
        problem = self._live(phase, everybody)
        # The reason that the world reports explains why it missed the point.
        assert "killed by SIGKILL" in problem, (
            f"{context}: {problem} {self._recorded.events}"
        )
        if not everybody:
            killed = f"host {point.host} failed: killed by SIGKILL"
            assert problem.startswith(killed), f"{context}: {problem}"
        saved = steps_of(self._recorded, "saved")
        if phase == "restore":
            assert not saved, context
            return
        (restored,) = steps_of(self._recorded, "step_done")
        assert restored + 1 in saved, context
        self._expected = (restored + 1 + point.is_saved,)
        # A step that was reported as saved is never lost.
        assert max(saved) <= max(self._expected), context
        if not everybody:
            others = [n for n in range(4) if n != self._numbers[point.host]]
            self._numbers = others if len(self._numbers) == 4 else list(range(4))

    def end_well(self):
        """The last world finds what was left, saves, and lives."""
        problem = self._live("", False)
        assert not problem, problem
        assert len(steps_of(self._recorded, "saved")) == 2

    def _live(self, phase, everybody):
        self._ram.start_agents(self._numbers)
        self._recorded = RecordedEvents()
        return end_of_world(
            functools.partial(
                killed_tiers.live,
                directories=[self._ram.directory(n) for n in self._numbers],
                slices=2 if len(self._numbers) == 4 else 3,
                expected=self._expected,
                phase=phase,
                everybody=everybody,
                path=str(self._path),
            ),
            len(self._numbers),
            self._path / "logs",
            self._recorded,
        )


def steps_of(recorded, name):
    return [fields["step"] for fields in recorded.named(name)]


def end_of_world(work, num_hosts, logs, emit):
    """Why a world has failed; empty if it has not."""
    try:
        host_worlds.run(work, num_hosts=num_hosts, log_directory=logs, emit=emit)
    except errors.RunError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_worlds_that_are_killed_lose_nothing_and_leave_nothing(ram, tmp_path):
    lives = Lives(ram, tmp_path)
    lives.end_in("save", everybody=False)
    lives.end_in("replicate", everybody=False)
    lives.end_in("collect", everybody=True)
    lives.end_in("back_up", everybody=False)
    lives.end_in("restore", everybody=True)
    lives.end_well()


HOSTS = 3
MOST_SECS = 1.0


def live_until_killed(place, emit, *, directories, path, victims, secs):
    """A host that restores, saves each step, and kills `victims` after some time."""
    killed_tiers.note_pid(path, place.host)
    host_process.configure(schema.WorldSection())
    with host_process.joined(place):
        mesh = topology.mesh_of(topology.present(HOSTS))
        checkpointer = frontend.Checkpointer(
            tier_worlds.tiers(directories[place.host], copies=1),
            run="run",
            slice_name=str(place.host),
            emit=emit if place.host == 0 else events.nobody,
        )
        with checkpointer:
            step = killed_tiers.restore(checkpointer, mesh)
            begun = os.open(
                f"{path}/begun-{place.host}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            )
            if place.host == 0:
                emit("step_done", step=step)
                threading.Timer(secs, kill_hosts, [path, victims]).start()
            while True:
                step += 1
                state = tier_worlds.state(mesh, step, True)
                checkpointables = {"state": state, "data": tier_worlds.Counter(step)}
                if (
                    checkpointer.save_checkpointables_async(step, checkpointables)
                    is not None
                ):
                    os.pwrite(begun, f"{step:9}".encode(), 0)


def kill_hosts(path, victims):
    # The own process last.
    for number in sorted(victims, reverse=True):
        killed_tiers.kill_host(path, number)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(4, marks=pytest.mark.slow),
        pytest.param(100, marks=pytest.mark.night),
    ],
)
def test_hosts_that_save_each_step_are_killed_at_random(ram, tmp_path, number):
    """All hosts, whose machines keep their memory, or a machine with its memory.

    Then the next world has to find the last step of which all copies were reported; if
    no memory is lost, the last but the one in flight.
    """
    drawn = random.Random(number)
    least = 0
    for life in range(number + 1):
        ram.start_agents(range(HOSTS))
        host = drawn.choice([None, *range(HOSTS)])
        recorded = RecordedEvents()
        program = functools.partial(
            live_until_killed,
            directories=[ram.directory(n) for n in range(HOSTS)],
            path=str(tmp_path),
            victims=range(HOSTS) if host is None else [host],
            secs=drawn.uniform(0, MOST_SECS),
        )
        problem = end_of_world(program, HOSTS, tmp_path / "logs", recorded)
        assert "killed by SIGKILL" in problem, problem
        restored = max(steps_of(recorded, "step_done"))
        assert restored >= least, (life, restored, least)
        if host is None:
            begun = [(tmp_path / f"begun-{n}").read_text() for n in range(HOSTS)]
            # All hosts have begun the last one of these.
            all_begun = min(int(each or restored) for each in begun) - 1
            least = max([restored, *steps_of(recorded, "saved"), all_begun])
        else:
            shutil.rmtree(ram.directory(host))
            least = max([0, *steps_of(recorded, "replicated")])
