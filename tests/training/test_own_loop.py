"""A loop of the user's own, recorded in a run directory: audit, status and report."""

import contextlib
import errno
import importlib
import json
import sys
from unittest import mock

import jax
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.cli import main
from elastic_ckpt.core import errors, jsonlog, process, storage
from elastic_ckpt.elastic.world import BetweenWorlds, World
from elastic_ckpt.inspect import run_files
from elastic_ckpt.tiers.persistent.claims import Claimant
from elastic_ckpt.training import step_log
from tests import corpora, json_outputs


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a run that ended early, and was finished on other devices."""
    directory = tmp_path_factory.mktemp("own_loop")
    texts = [{"text": f"text {n} " * (1 + n % 5)} for n in range(300)]
    corpora.write_arrayrecord(directory / "texts.array_record", texts)
    (directory / "program.py").write_text(
        "import functools, elastic_ckpt as ec\n"
        f"keys = {{'grain_train_files': {str(directory / 'texts.array_record')!r}}}\n"
        "made = functools.partial(ec.data.from_config, keys, max_target_length=32)\n"
        "data, other_data = made(), made(data_shuffle_seed=7)\n"
        "def make_shard(shard): return data\n"
    )
    (directory / "inserts.py").write_text(
        "import sys\nfrom program import data\nsys.path.insert(0, '/elsewhere')\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        program = importlib.import_module("program")
        with pytest.raises(ZeroDivisionError):
            train(directory, program.data, devices=2, batch_size=8, until=6, steps=12)
        train(directory, program.data, devices=4, batch_size=16, until=12, steps=12)
        yield directory
    del sys.modules["program"]


def train(directory, data, *, devices, batch_size, until, steps):
    """A loop from the newest step on, which fails if it ends before its last one."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    tiers = [
        ec.Local(directory / "ram", every=1),
        ec.Persistent(directory / "saved", every=2),
    ]
    batches = ec.batches(data, mesh=mesh, global_batch_size=batch_size)
    step, state = 0, {"seen": np.zeros((), np.int32)}
    with (
        contextlib.closing(batches),
        ec.RunDirectory(directory / "run", tiers=tiers, steps=steps) as run,
        ec.Checkpointer(tiers, emit=run.emit) as checkpointer,
    ):
        if checkpointer.latest is not None:
            step = checkpointer.latest.step
            wanted = {"state": state, "data": batches}
            state = checkpointer.load_checkpointables(step, wanted)["state"]
        while step < until:
            batch = next(batches)
            step += 1
            state = {"seen": np.asarray(state["seen"] + batch["targets"].size)}
            run.log(step, batch, loss=1 / step)
            if step % 3 or step == steps:
                parts = {"state": state, "data": batches}
                checkpointer.save_checkpointables(step, parts)
        assert step == steps or 1 / 0


def run_verb(capsys, *arguments):
    code = main.main([str(each) for each in arguments])
    output = capsys.readouterr().out
    if "--json" in arguments:
        json_outputs.check(arguments[0], output)
    return code, output


def test_every_verb_reads_a_loop_that_failed_and_changed_its_devices(
    place, capsys, monkeypatch
):
    monkeypatch.chdir(place)
    code, output = run_verb(capsys, "audit", "run", "--data", "program:data", "--json")
    audited = json.loads(output)
    assert (code, audited["passed"]) == (0, True)
    assert audited["num_steps"] == audited["num_identical_steps"] == 12
    assert len(audited["hosts"]) == 2
    code, output = run_verb(capsys, "audit", "run", "--data", "program:other_data")
    assert code == 1
    assert "FAILED: step 1 (rows 0 to 7 of the data): the batch of the one" in output
    before = [*sys.path]
    assert run_verb(capsys, "audit", "run", "--data", "inserts:data")[0] == 0
    assert sys.path == ["/elsewhere", *before]
    sys.path.remove("/elsewhere")
    asked = ("audit", "run", "--data", "program:data")
    _, output = run_verb(capsys, *asked, "--step", "8", "--json")
    (batch,) = json.loads(output)
    assert (batch["step"], len(batch["rows"])) == (8, 16)
    record = batch["rows"][3][0]["record"]
    _, output = run_verb(capsys, *asked, "--find", f"texts.array_record:{record}")
    assert output.startswith(f"texts.array_record:{record}, epoch 0")
    assert "  step 8, row 3, attempt 2\n" in output
    _, output = run_verb(capsys, "status", "run")
    for text in (
        "run: finished",
        "12 of 12",
        "in RAM     step 12",
        "in storage step 12",
    ):
        assert text in output
    _, output = run_verb(capsys, "status", "run", "--json")
    assert json.loads(output)["loss"] > 0
    assert main.main(["report", "run", "--no-audit"]) == 0
    assert "<h2>Loss</h2>" in (place / "run/report.html").read_text()
    for verb, text in (
        (["audit", "run"], "specify the data with --data MODULE:NAME"),
        (
            ["audit", "run", "--data", "program:make_shard"],
            "a function that takes no arguments",
        ),
        (["scale", "run", "--slices", "2"], "where it calls ec.elastic.run"),
    ):
        assert main.main(verb) != 0
        assert text in capsys.readouterr().err


class Recording:
    """A run in a directory, of batches of four rows, and the events that it shows."""

    def __init__(self, directory):
        self.directory, self.told = directory, []
        self.tiers = [ec.Persistent(directory / "saved", every=1)]
        texts = [{"text": f"text {n}"} for n in range(40)]
        self.file = directory / "a.array_record"
        corpora.write_arrayrecord(self.file, texts)
        self.begin_again()

    def begin_again(self):
        """Begins with the first rows."""
        data = ec.data.from_config(
            grain_train_files=str(self.file),
            max_target_length=16,
            enable_data_shuffling=False,
        )
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        self.batches = ec.batches(data, mesh=mesh, global_batch_size=4)

    def run(self, **options):
        given = {"tiers": self.tiers, "emit": self._emit, **options}
        return ec.RunDirectory(self.directory / "run", **given)

    def _emit(self, name, **fields):
        self.told.append((name, fields))

    def values(self, key):
        return [(name, fields.get(key)) for name, fields in self.told]

    def records(self):
        (attempt,) = step_log.read(self.directory / "run")
        return attempt.records


@pytest.fixture
def recording(tmp_path):
    made = Recording(tmp_path)
    yield made
    made.batches.close()


def test_a_loop_and_its_steps_may_share_a_directory_that_is_moved(
    tmp_path, recording, capsys
):
    tiers = [ec.Persistent(tmp_path / "run", every=1)]
    with (
        recording.run(tiers=tiers) as run,
        ec.Checkpointer(tiers, emit=run.emit) as checkpointer,
    ):
        run.log(1, next(recording.batches))
        checkpointer.save(1, {"w": jax.numpy.ones(1)})
        _, output = run_verb(capsys, "status", tmp_path / "run")
        assert output.startswith("run: training\n")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    # The identity of the run and its record.
    assert {"run.json", "record.json"} <= {each.name for each in moved.iterdir()}
    _, output = run_verb(capsys, "status", moved)
    assert output.startswith("run: finished\n")
    assert "in storage step 1," in output
    _, output = run_verb(capsys, "inspect", moved)
    assert "step 1: complete" in output
    assert run_verb(capsys, "verify", moved)[0] == 0


def test_audit_numbers_steps_as_they_are_logged(
    tmp_path, recording, capsys, monkeypatch
):
    for first in (1, 3):
        with recording.run() as run:
            for step in (first, first + 1):
                run.log(step, next(recording.batches))
        recording.begin_again()
    (tmp_path / "made.py").write_text(
        "import elastic_ckpt as ec\n"
        "data = ec.data.from_config(\n"
        "    max_target_length=16, enable_data_shuffling=False,\n"
        f"    grain_train_files={str(recording.file)!r})\n"
    )
    monkeypatch.chdir(tmp_path)
    code, output = run_verb(capsys, "audit", "run", "--data", "made:data")
    assert code == 1
    assert "FAILED: step 3 (rows 0 to 3 of the data): other steps have used" in output
    assert output.endswith("was the data state restored?\n")


def test_losses_may_be_left_out_and_mistakes_are_refused(recording):
    with recording.run() as run:
        for step in range(1, 6):
            run.log(step, next(recording.batches))
        batch = next(recording.batches)
        some = {name: batch[name] for name in ("inputs", "targets")}
        for arguments, says in (
            ((0, batch), "step=0, but the first step is 1; pass the number"),
            ((batch, 1), r"step is of type dict; .*log\(step, b"),
            ((6, some), "no 'example_id'; it has only inputs"),
        ):
            with pytest.raises(ec.ElasticCkptError, match=says):
                run.log(*arguments)
        live = "written by another live run"
        with pytest.raises(ec.ElasticCkptError, match=live):
            recording.run()
    assert [record.step for record in recording.records()] == [0, 1, 2, 3, 4]
    assert all(record.loss != record.loss for record in recording.records())


def test_every_step_is_durable_when_its_save_is_announced(recording, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with recording.run(steps=9) as run:
        for step in range(1, 7):
            run.log(step, next(recording.batches), loss=jax.numpy.float32(step))
        run.emit("save_started", step=6)
        logged = [(each.step, each.row, each.loss) for each in recording.records()]
        assert logged == [(n, 4 * n, n + 1) for n in range(6)]
        # Each is told before the save that has it.
        steps = [("step", step) for step in range(1, 7)]
        assert recording.values("step")[1:] == [*steps, ("save_started", 6)]
        with monkeypatch.context() as patch:
            patch.setattr(jsonlog._File, "_take", full)
            run.log(7, next(recording.batches), loss=7.0)
            run.emit("save_started", step=7)
        name, why = recording.values("why")[-2]
        assert name == "degraded"
        assert "the step log cannot be written, so each step retries" in why
        run.emit("save_started", step=7)
        assert len(recording.records()) == 7
    assert recording.values("step")[-1] == ("run_stopped", 7)


@pytest.mark.parametrize("method", ["__init__", "write"])
def test_a_step_that_was_not_logged_is_not_saved(recording, monkeypatch, method):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with (  # noqa: PT012
        pytest.raises(OSError, match="No space left"),
        recording.run() as run,
        monkeypatch.context() as patch,
    ):
        patch.setattr(step_log.StepLog, method, full)
        with contextlib.suppress(OSError):
            run.log(1, next(recording.batches))
        for _ in range(2):
            with contextlib.suppress(OSError):
                run.emit("save_started", step=1)
    told = [name for name, _ in recording.told]
    assert "save_started" not in told
    # The audit of a start that was told expects its attempt.
    assert ("run_started" in told) == (method == "write")


@pytest.mark.parametrize(
    ("events_of_save", "retrained", "is_saved"),
    [
        (["save_started"], [], False),
        (["save_started", "saved"], [], True),
        # It went back, and has saved nothing since.
        (["save_started", "saved"], [2, 3], False),
        (["restored_from"], [], True),
    ],
)
def test_a_run_that_stops_is_saved_if_its_last_step_is_committed(
    recording, events_of_save, retrained, is_saved
):
    with recording.run(steps=9) as run:
        for step in (1, 2, 3):
            run.log(step, next(recording.batches))
        for name in events_of_save:
            run.emit(name, step=3, secs=0.0)
        for step in retrained:
            run.log(step, next(recording.batches))
    assert recording.values("saved")[-1] == ("run_stopped", is_saved)


def test_the_metrics_of_a_step_may_come_later_and_after_it_is_saved(recording):
    with recording.run() as run:
        for step in (1, 2):
            run.log(step, next(recording.batches), tokens=128, learning_rate=0.5)
            run.emit("save_started", step=step)
            run.log_metrics(step, loss=jax.numpy.float32(step / 2), learning_rate=0.25)
        run.emit("data_ended", step=2)
    assert recording.values("loss") == [
        ("run_started", None),
        ("save_started", None),
        ("step", 0.5),
        ("save_started", None),
        ("step", 1.0),
        ("data_ended", None),
        # No number of steps was given, and the data has ended.
        ("run_finished", None),
    ]
    _, step = recording.told[2]
    # What was known of the step is kept.
    assert (step["tokens"], step["learning_rate"]) == (128, 0.25)


def test_error_of_the_loop_is_the_end_of_its_events(recording):
    with pytest.raises(ZeroDivisionError), recording.run() as run:  # noqa: PT012
        run.emit("save_started", step=3)
        raise ZeroDivisionError("in the loop")
    text = (recording.directory / "run" / "events.jsonl").read_text()
    last = json.loads(text.splitlines()[-1])
    assert (last["event"], last["why"]) == ("run_failed", "in the loop")


def test_worlds_of_several_machines_need_no_lock_and_of_one_machine_they_do(recording):
    def recorded(owner):
        claimant = Claimant(name="start", owner=owner)
        between = BetweenWorlds(claimant=claimant, answer="resume")
        world = World(number=2, slices=(0,), slice_name="0", _between=between)
        with recording.run(world=world) as run:
            run.log(1, next(recording.batches))
        return [name for name, _ in recording.told]

    # A host that stands still may hold it for ever.
    with storage.exclusive_lock(recording.directory / "run" / run_files.LOCK):
        # The run is not over.
        assert recorded(owner=None) == ["run_started", "step", "run_stopped"]
        with pytest.raises(errors.RunError, match="written by another live run"):
            recorded(owner=process.this())
