"""A run on several machines outlives each of them, and the one that leads it, too."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import leader_claim
from elastic_ckpt.inspect import run_files
from elastic_ckpt.steps import layout
from elastic_ckpt.tiers.persistent import claims as world_claims
from elastic_ckpt.training import audit, step_log
from tests import corpora, process_tree, runs, shared_memory
from tests.processes import claims, great_runs, networks, own_training, supervisors


def lead_in_turn(run):
    """The leader is killed with its memory, stands still, and is asked to end."""
    with supervised(run) as machines:
        machines.train_on([0, 1])
        first = machines.leader()
        second = 1 - first
        machines.kill(first)
        machines.train_on([second])
        machines.start(first)
        machines.train_on([0, 1])
        # Its connections stay open.
        machines.freeze(second)
        machines.train_on([first])
        machines.wake(second)
        machines.train_on([0, 1])
        machines.started[first].terminate()
        code, output = machines.ended(first)
        assert code == 128 + signal.SIGTERM, output
        machines.train_on([second])
        machines.stop()
        run.machines = first, second


@contextlib.contextmanager
def supervised(run, network=None):
    """The supervisors of a great run on two machines."""
    settings = run.settings
    del settings["hosts"], settings["slices"]
    with supervisors.Supervisors(
        *(run.directory, run.corpus, run.ram), machines=2, network=network, **settings
    ) as machines:
        yield machines


@pytest.mark.slow
class TestMachines(claims.Claims):
    scenario = great_runs.Scenario(drive=lead_in_turn, tells=[], verdicts=[])

    def test_events_tell_each_fault_and_nothing_else(self, run):
        first, second = run.machines
        lost = [each["machine"] for each in run.events("leader_lost")]
        assert lost == [first, second]
        leaders = [each["leader"] for each in run.events("leader_found")]
        assert leaders == [first, second, first, second]

    def test_a_machine_that_is_asked_to_leave_loses_no_step(self, run):
        *_, before, last = run.attempts
        assert before.records[-1].step + 1 == last.start_step

    def test_no_world_begins_with_the_first_step_again(self, run):
        # The first machine may begin a world alone, which is given up as the second one
        # comes, while the news of its first steps is under way.
        attempts = [each for each in run.attempts if each.records]
        first = next(n for n, each in enumerate(attempts) if each.hosts == 2)
        assert attempts[0].start_step == 0
        assert all(each.start_step for each in attempts[first + 1 :])
        # A world that is known to have saved is not given up.
        began = [
            each for each in run.events("world_started") if each["slices"] == [0, 1]
        ]
        saved = [each["time"] for each in run.events("saved")]
        assert attempts[first].start_step or min(saved) > began[0]["time"]


def divide(run):
    """Two machines lose each other, though both reach the storage, and meet again."""
    with networks.Network(2) as network, supervised(run, network) as machines:
        machines.train_on([0, 1])
        run.leader = machines.leader()
        network.join([[0], [1]])
        machines.train_on([run.leader])
        network.join([[0, 1]])
        machines.train_on([0, 1])
        machines.started[1 - run.leader].terminate()
        machines.ended(1 - run.leader)
        machines.train_on([run.leader])
        machines.stop()


@pytest.mark.slow
class TestDivided(claims.Claims):
    scenario = great_runs.Scenario(
        drive=divide,
        settings={"elastic_machine_timeout_seconds": 10},
        verdicts=["machine_lost"],
    )

    def test_events_tell_each_fault_and_nothing_else(self, run):
        lost = [each["slice"] for each in run.events("slice_lost")]
        assert lost == [1 - run.leader]

    def test_the_machine_that_holds_the_claim_goes_on_leading(self, run):
        assert [each["leader"] for each in run.events("leader_found")] == [run.leader]


def replace(run):
    """A start stands still while another machine continues its run."""
    period = "multi_tier_checkpointing_backup_interval_steps=4"
    on = (f"local_checkpoint_directory={run.ram}/{name}" for name in "ab")
    with run.start(next(on), period, leads_group=True) as old, killed_at_last(old):
        for line in old.stdout:
            if line.startswith("step ") and len(runs.saved_steps(run.path)) > 1:
                os.killpg(old.pid, signal.SIGSTOP)
                break
        # File systems that machines share may have no locks.
        (run.path / run_files.LOCK).unlink()
        run.last = runs.saved_steps(run.path)[-1] + 10
        run.train(next(on), period, f"steps={run.last}")
        run.before = step_log.read(run.path)
        os.killpg(old.pid, signal.SIGCONT)
        run.old_output = old.stdout.read()
    assert old.returncode == 1, run.old_output


@contextlib.contextmanager
def killed_at_last(started):
    """Kills a start of a run if the block raises: it may stand still."""
    try:
        yield
    except BaseException:
        os.killpg(started.pid, signal.SIGKILL)
        raise


@pytest.mark.slow
class TestReplacedStart(claims.Claims):
    """Nothing that it writes afterwards is read."""

    scenario = great_runs.Scenario(
        drive=replace,
        from_memory=False,
        replaced=[1],
        settings={"local_checkpoint_period": 2, "log_period": 1},
    )

    def test_it_has_trained_on_and_says_why_it_stops(self, run):
        told = "as world 2, so this launch commits no more steps there"
        assert run.old_output.count(told) == 1
        first, second = run.attempts
        assert [first.world, second.world] == [1, 2]
        assert len(first.records) > len(run.before[0].records)

    def test_only_the_second_world_counts_after_its_start(self, run):
        assert run.attempts[1] == run.before[1]
        lineage = step_log.lineage(run.attempts)
        attempts = [each.attempt for each in lineage.values()]
        assert attempts[run.attempts[1].start_step :] == [2] * 10
        assert runs.saved_steps(run.path)[-1] == run.last
        assert run.events()[-1]["event"] == "run_finished"


def test_a_start_that_cannot_claim_its_world_in_storage_does_not_train(
    tmp_path, corpus
):
    config = runs.write_config(tmp_path, corpus, hosts=1)
    claimed = tmp_path / "tiny" / layout.STEPS / world_claims.DIRECTORY
    claimed.parent.mkdir(parents=True)
    # It can be neither listed nor written.
    claimed.write_text("")
    ended = runs.cli("train", config)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.count("unreachable") == 1, ended.stderr
    assert "try again when the storage is back" in ended.stderr
    assert not list((tmp_path / "tiny" / step_log.DIRECTORY).glob("*"))


class Programs(supervisors.Supervisors):
    """Programs of a user on two machines."""

    def __init__(self, directory, ram):
        self.directory, self.ram, self.run = directory, ram, directory / "run"
        self.started = {}
        for number in range(2):
            self.start(number)

    def start(self, number):
        arguments = (self.directory, self.ram, 2, number)
        with open(self._output(number), "ab") as output:
            self.started[number] = subprocess.Popen(
                [
                    *process_tree.ENDS_WITH_PARENT,
                    *(sys.executable, own_training.__file__, *map(str, arguments)),
                ],
                cwd=runs.ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self, number):
        process_tree.kill(self.started.pop(number))
        memory = layout.slice_directory(self.ram, number)
        shutil.rmtree(memory, ignore_errors=True)

    def leader(self):
        leaders = leader_claim.LeaderClaims(
            self.directory / "steps", machine=-1, lost_secs=1.0
        )
        return leaders.look().machine

    def train_on(self, slices, *, steps=8):
        def is_trained():
            with contextlib.suppress(errors.DataError):
                *_, last = step_log.read(self.run)
                return last.hosts == len(slices) and len(last.records) >= steps
            return False

        self.wait_until(is_trained)


@pytest.mark.slow
def test_a_training_function_of_a_user_outlives_its_leader(tmp_path, monkeypatch):
    texts = [{"text": f"text {n} " * (1 + n % 4)} for n in range(100)]
    file = corpora.write_arrayrecord(tmp_path / "texts.array_record", texts)
    monkeypatch.setenv(own_training.FILES, str(file))
    with shared_memory.directory("own") as ram, Programs(tmp_path, ram) as programs:
        programs.train_on([0, 1])
        programs.kill(programs.leader())
        (left,) = programs.started
        programs.train_on([left])
        (tmp_path / "end").touch()
        code, output = programs.ended(left)
        assert code == 0, output
    outcome = audit.RunAudit(
        str(programs.run), data=f"{own_training.__name__}:data"
    ).outcome()
    assert outcome.passed
    assert outcome.hosts == (2, 1)
    assert outcome.num_identical_steps == outcome.num_steps
    events = run_files.read_events(str(programs.run))
    # The steps of the lost machine were in the memory of the other one.
    (restored,) = [each for each in events if each["event"] == "restored_from"]
    assert restored["persistent_bytes"] == 0
