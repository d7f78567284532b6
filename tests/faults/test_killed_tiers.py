"""`kill -9` of one host and of all, anywhere in a save, its copies, and a restore.

The machines, and the files in their RAM, outlive the processes. A world may be killed
at any point. The next one, of as many hosts or of those that are left, finds a whole
step that is not older than any step reported as saved, and no unfinished files; and it
saves again.
"""

import functools

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import supervisor
from tests.faults import killed_tiers
from tests.multiprocess import machines


class Lives:
    """Worlds on four machines, each one after the other was killed."""

    def __init__(self, ram, path):
        self._ram = ram
        self._path = path
        self._numbers = list(range(4))
        self._expected = ()

    def end_at(self, phase, name, *, everybody):
        """A world finds what the one before left, and is killed at a point."""
        point = killed_tiers.POINTS[name]
        context = f"{phase}, {name}, on the machines {self._numbers}"
        problem = self._live(phase, point, everybody)
        # The reason that the world reports explains why it missed the point.
        assert "killed by SIGKILL" in problem, f"{context}: {problem} {self._events}"
        if not everybody:
            killed = f"host {point.host} failed: killed by SIGKILL"
            assert problem.startswith(killed), f"{context}: {problem}"
        (restored,) = self._heard("run_stopped") or [max(self._expected, default=0)]
        saved = self._heard("saved")
        if phase == "restore":
            assert not saved, context
            return
        older, newer = restored + 1, restored + 2
        assert older in saved, context
        self._expected = {
            "older": (older,),
            "newer": (newer,),
            "either": (older, newer),
        }[point.then]
        # A step that was reported as saved is never lost.
        assert max(saved) <= max(self._expected), context
        self._expected = tuple(s for s in self._expected if s >= max(saved))
        if everybody:
            return
        if len(self._numbers) < 4:
            self._numbers = list(range(4))
        else:
            del self._numbers[point.host]

    def end_well(self):
        """The last world finds what was left, saves, and lives."""
        problem = self._live("save", None, False)
        assert not problem, problem
        assert len(self._heard("saved")) == 2

    def _heard(self, name):
        return [fields["step"] for event, fields in self._events if event == name]

    def _live(self, phase, point, everybody):
        self._ram.start_agents(self._numbers)
        pids = self._path / "pids"
        pids.mkdir(exist_ok=True)
        for file in pids.iterdir():
            file.unlink()
        self._events = []
        slices = 2 if len(self._numbers) == 4 else 3
        life = killed_tiers.Life(
            expected=self._expected,
            point=point,
            phase=phase,
            everybody=everybody,
            pids=str(pids),
            storage=str(self._path / "steps"),
        )
        world = supervisor.HostProcesses(
            functools.partial(
                killed_tiers.live,
                directories=[self._ram.directory(n) for n in self._numbers],
                slices=slices,
                life=life,
            ),
            num_hosts=len(self._numbers),
            log_directory=self._path / "logs",
            emit=lambda name, **fields: self._events.append((name, fields)),
        )
        try:
            world.run()
        except errors.RunError as error:
            return str(error)
        return ""


@pytest.fixture
def lives(tmp_path):
    with machines.Machines() as ram:
        yield Lives(ram, tmp_path)


@pytest.mark.slow
def test_worlds_that_are_killed_lose_nothing_and_leave_nothing(lives):
    lives.end_at("save", "with_the_manifest_half_written", everybody=False)
    lives.end_at("replicate", "with_the_first_copy_written", everybody=False)
    lives.end_at("collect", "with_the_older_step_half_gone", everybody=True)
    lives.end_at("back_up", "with_stores_merged", everybody=False)
    lives.end_at("restore", "with_a_component_half_written", everybody=True)
    lives.end_well()
