"""A loop of the user's own, recorded in a run directory: audit, status and report."""

import contextlib
import errno
import functools
import importlib
import json
import sys
from unittest import mock

import jax
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors, events, jsonlog, process, storage
from elastic_ckpt.elastic.world import BetweenWorlds, World
from elastic_ckpt.inspect import run_files
from elastic_ckpt.tiers.persistent.claims import Claimant
from elastic_ckpt.training import step_log
from tests import corpora, runs
from tests.recorded_events import RecordedEvents


def train(directory, data, *, devices, batch_size, until, steps=12):
    """A loop from the newest step on, which fails if it ends before its last one."""
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    # The steps share the directory of the run.
    tiers = [ec.Local(directory / "ram", every=1), ec.Persistent("run", every=2)]
    batches = ec.batches(data, mesh=mesh, global_batch_size=batch_size)
    step, state = 0, {"seen": np.zeros((), np.int32)}
    with (
        contextlib.closing(batches),
        ec.RunDirectory("run", tiers=tiers, steps=steps) as run,
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
                checkpointables = {"state": state, "data": batches}
                checkpointer.save_checkpointables(step, checkpointables)
        assert runs.verb("status", "run").startswith("run: training\n")
        if step < steps:
            raise ZeroDivisionError("in the loop")


def test_every_verb_reads_a_loop_that_failed_changed_its_devices_and_was_moved(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    texts = [{"text": f"text {n} " * (1 + n % 5)} for n in range(300)]
    file = tmp_path / "texts.array_record"
    corpora.write_arrayrecord(file, texts)
    (tmp_path / "own_program.py").write_text(
        "import functools, elastic_ckpt as ec\n"
        f"keys = {{'grain_train_files': {str(file)!r}}}\n"
        "made = functools.partial(ec.data.from_config, keys, max_target_length=32)\n"
        "data, other_data = made(), made(data_shuffle_seed=7)\n"
        "def make_shard(shard): return data\n"
    )
    (tmp_path / "inserts.py").write_text(
        "import sys\nfrom own_program import data\nsys.path.insert(0, '/elsewhere')\n"
    )
    program = importlib.import_module("own_program")
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, program.data, devices=2, batch_size=8, until=6)
    (failed,) = runs.events(tmp_path / "run", "run_failed")
    assert (failed["step"], failed["why"]) == (6, "in the loop")
    train(tmp_path, program.data, devices=4, batch_size=16, until=12)
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    # The identity of the run and its record.
    assert {"run.json", "record.json"} <= {each.name for each in moved.iterdir()}
    audit = functools.partial(runs.verb, "audit", "moved", "--data")
    audited = json.loads(audit("own_program:data", "--json"))
    assert audited["passed"]
    assert audited["num_steps"] == audited["num_identical_steps"] == 12
    assert len(audited["hosts"]) == 2
    output = audit("own_program:other_data", code=1)
    assert "FAILED: step 1 (rows 0 to 7 of the data): the batch of the one" in output
    before = [*sys.path]
    audit("inserts:data")
    assert sys.path == ["/elsewhere", *before]
    sys.path.remove("/elsewhere")
    (batch,) = json.loads(audit("own_program:data", "--step", "8", "--json"))
    assert (batch["step"], len(batch["rows"])) == (8, 16)
    piece = batch["rows"][3][0]
    record = f"texts.array_record:{piece['record']}"
    output = audit("own_program:data", "--find", record)
    assert output.startswith(f"{record}, epoch 0")
    assert f"  step 8, row 3, tokens 0 to {piece['num_tokens']}, attempt 2\n" in output
    assert json.loads(runs.verb("status", "moved", "--json"))["loss"] > 0
    runs.verb("report", "moved", "--no-audit")
    assert "<h2>Loss</h2>" in (moved / "report.html").read_text()
    for verb, texts in {
        "status": ("run: finished", "12 of 12", "RAM     step 12", "storage step 12"),
        "inspect": ("step 12: complete",),
        "verify": (),
    }.items():
        output = runs.verb(verb, "moved")
        assert all(text in output for text in texts), output
    for arguments, says in (
        (("audit", "moved"), "specify the data with --data MODULE:NAME"),
        (("audit", "moved", "--data", "own_program:make_shard"),
         "a function that takes no arguments"),
        (("scale", "moved", "--slices", "2"), "where it calls ec.elastic.run"),
    ):  # fmt: skip
        assert says in runs.verb(*arguments, code=1)


FULL = OSError(errno.ENOSPC, "No space left on device")


class Recording:
    """A run in a directory, of batches of four rows, and the events that it shows."""

    def __init__(self, directory, data):
        self.directory, self.emit = directory, RecordedEvents()
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        self.batches = ec.batches(data, mesh=mesh, global_batch_size=4)

    def run(self, **options):
        tiers = [ec.Persistent(self.directory / "saved", every=1)]
        given = {"tiers": tiers, "emit": self.emit, **options}
        return ec.RunDirectory(self.directory / "run", **given)

    def log(self, run, *steps, **values):
        for step in steps:
            run.log(step, next(self.batches), **values)

    def values(self, key):
        return [(name, fields.get(key)) for name, fields in self.emit.events]

    def records(self):
        (attempt,) = step_log.read(self.directory / "run")
        return attempt.records


@pytest.fixture
def recording(tmp_path, data):
    made = Recording(tmp_path, data)
    yield made
    made.batches.close()


def test_losses_may_be_left_out_and_mistakes_are_refused(tmp_path, recording):
    with recording.run() as run:
        run.emit("world_claimed", world=3, step=0)
        recording.log(run, *range(1, 6))
        batch = next(recording.batches)
        some = {name: batch[name] for name in ("inputs", "targets")}
        for arguments, says in (
            ((0, batch), "step=0, but the first step is 1; pass the number"),
            ((batch, 1), r"step is of type dict; .*log\(step, b"),
            ((6, some), "no 'example_id'; it has only inputs"),
        ):
            with pytest.raises(ec.ElasticCkptError, match=says):
                run.log(*arguments)
    assert [record.step for record in recording.records()] == [0, 1, 2, 3, 4]
    assert all(record.loss != record.loss for record in recording.records())
    assert [each.world for each in step_log.read(tmp_path / "run")] == [3]


def test_every_step_is_durable_when_its_save_is_announced(recording, monkeypatch):
    with recording.run(steps=9) as run:
        for step in range(1, 7):
            recording.log(run, step, loss=jax.numpy.float32(step))
        run.emit("save_started", step=6)
        logged = [(each.step, each.row, each.loss) for each in recording.records()]
        assert logged == [(n, 4 * n, n + 1) for n in range(6)]
        # Each is told before the save that has it.
        steps = [("step", step) for step in range(1, 7)]
        assert recording.values("step")[1:] == [*steps, ("save_started", 6)]
        with monkeypatch.context() as patch:
            patch.setattr(jsonlog._File, "_take", mock.Mock(side_effect=FULL))
            recording.log(run, 7, loss=7.0)
            run.emit("save_started", step=7)
            assert len(recording.records()) == 6
        name, why = recording.values("why")[-2]
        assert name == "degraded"
        assert "the step log cannot be written, so each step retries" in why
        run.emit("save_started", step=7)
        assert len(recording.records()) == 7
    assert recording.values("step")[-1] == ("run_stopped", 7)
    monkeypatch.setattr(jsonlog._File, "_take", mock.Mock(side_effect=FULL))
    lost = r"cannot be logged: .*No space left.* free up space there"
    with pytest.raises(errors.RunError, match=lost), recording.run() as run:
        recording.log(run, 8, loss=8.0)


@pytest.mark.parametrize("method", ["__init__", "write"])
def test_a_step_that_was_not_logged_is_not_saved(recording, monkeypatch, method):
    with (  # noqa: PT012
        pytest.raises(OSError, match="No space left"),
        recording.run() as run,
        monkeypatch.context() as patch,
    ):
        patch.setattr(step_log.StepLog, method, mock.Mock(side_effect=FULL))
        with contextlib.suppress(OSError):
            recording.log(run, 1)
        for _ in range(2):
            with contextlib.suppress(OSError):
                run.emit("save_started", step=1)
    told = [name for name, _ in recording.emit.events]
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
        recording.log(run, 1, 2, 3)
        for name in events_of_save:
            fields = dict.fromkeys(events.NAMES[name].fields, 0)
            run.emit(name, **fields | {"step": 3})
        recording.log(run, *retrained)
    assert recording.values("saved")[-1] == ("run_stopped", is_saved)


def test_the_metrics_of_a_step_may_come_later_and_after_it_is_saved(recording):
    with recording.run(steps=9) as run:
        for step in (1, 2):
            recording.log(run, step, tokens=128, learning_rate=0.5)
            run.emit("save_started", step=step)
            run.log_metrics(step - 1, loss=9.0)
            run.log_metrics(step, loss=jax.numpy.float32(step / 2), learning_rate=0.25)
        run.emit("data_ended", step=2)
    assert recording.values("loss") == [
        ("run_started", None),
        ("save_started", None),
        ("step", 0.5),
        ("save_started", None),
        ("step", 1.0),
        ("data_ended", None),
        # The data has ended before the last step.
        ("run_finished", None),
    ]
    _, step = recording.emit.events[2]
    # What was known of the step is kept.
    assert (step["tokens"], step["learning_rate"]) == (128, 0.25)


def test_worlds_of_several_machines_need_no_lock_and_of_one_machine_they_do(recording):
    def recorded(owner):
        claimant = Claimant(name="start", owner=owner)
        between = BetweenWorlds(claimant=claimant, answer="resume")
        world = World(number=2, slices=(0,), slice_name="0", _between=between)
        with recording.run(world=world) as run:
            recording.log(run, 1)
        return [name for name, _ in recording.emit.events]

    # A host that stands still may hold it for ever.
    with storage.exclusive_lock(recording.directory / "run" / run_files.LOCK):
        # The run is not over.
        assert recorded(owner=None) == ["run_started", "step", "run_stopped"]
        with pytest.raises(errors.RunError, match="written by another live run"):
            recorded(owner=process.this())
