"""Runs of MaxText's stand-in on our data and checkpoints."""

import contextlib
import errno
import importlib
import json
import os
import re
import shutil
import signal
import socket
import sys

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.cli import main
from elastic_ckpt.core import errors
from elastic_ckpt.data import data_keys, iterator
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.integrations import maxtext, maxtext_hooks
from elastic_ckpt.training import audit
from tests import shared_memory
from tests.checkpoint import conftest as checkpoint
from tests.integrations import stand_in
from tests.recorded_events import RecordedEvents


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The directory of the stand-in, with texts to train on and some held out."""
    directory = tmp_path_factory.mktemp("maxtext")
    stand_in.write_texts(directory)
    (directory / "maxtext" / "assets").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, stand_in.installed(directory):
        # So that it is gone afterwards, too.
        patch.setenv("MAXTEXT_ASSETS_ROOT", "")
        patch.delenv("MAXTEXT_ASSETS_ROOT")
        yield directory


@pytest.fixture
def run(installed, tmp_path):
    """Trains in this test's directory; returns the batches of the run."""

    def trained(*, code=0, **settings):
        given = stand_in.arguments(installed, tmp_path, **settings)
        assert main.main(["maxtext", *given]) == code
        return [jax.tree.map(np.asarray, batch) for batch in program().BATCHES]

    return trained


@pytest.fixture
def ram():
    with shared_memory.directory("maxtext") as directory:
        yield directory


def program():
    return importlib.import_module("maxtext.trainers.pre_train.train")


def tiers(ram, **settings):
    return {
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": ram,
        "local_checkpoint_period": 100,
        "local_checkpoint_size_limit": "64Mi",
        "multi_tier_checkpointing_backup_interval_steps": 100,
        **settings,
    }


def equal(left, right):
    return jax.tree.all(jax.tree.map(np.array_equal, left, right))


def our_batches(installed, sizes):
    """What `ec.batches` makes of the same files, without the features of ours."""
    data = pipeline.from_config(
        data_keys.DataKeys(
            grain_train_files=f"{installed}/texts",
            grain_record_format="tf_example",
            num_logical_shards=8,
            max_target_length=24,
            packing=True,
        )
    )
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    with contextlib.closing(
        iterator.Batches(data, mesh=mesh, global_batch_size=sizes[0])
    ) as ours:
        for size in sizes:
            ours.resize(size)
            batch = next(ours)
            yield {name: batch[name] for name in maxtext.FEATURES}


def last_line(capfd):
    """The last line on the standard error, without log records of libraries."""
    lines = capfd.readouterr().err.splitlines()
    return [line for line in lines if not re.match(r"[IW]\d{4} ", line)][-1]


def test_its_steps_take_our_batches_and_verbs_read_the_run(
    installed, run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(program(), "SAVES_STEPS", True)
    directory = tmp_path / "runs" / "first"
    made = run(steps=4, checkpoint_dir=f"{directory}/checkpoints")
    assert equal(made, list(our_batches(installed, [8] * 4)))
    assert {(x.shape, str(x.dtype)) for x in made[0].values()} == {((8, 24), "int32")}
    # MaxText is as it was, and finds its tokenizers in its package.
    for hook in (*maxtext_hooks.HOOKS, *maxtext_hooks.NAMES):
        assert hook.look_up().__module__.startswith("maxtext.")
    assert os.environ["MAXTEXT_ASSETS_ROOT"] == str(installed / "maxtext" / "assets")

    events = (directory / "events.jsonl").read_text().splitlines()
    names = [json.loads(line)["event"] for line in events]
    assert (names[0], names[-1]) == ("run_started", "run_finished")
    capsys.readouterr()
    assert main.main(["inspect", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "step 3: complete" in shown
    assert "  1 arrays, 8 bytes" in shown
    assert 'data: sharded, position {"batches": [[8, 4]]}' in shown
    assert main.main(["status", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "step       4 of 4" in shown
    assert "in storage step 3" in shown
    # Each step was saved before MaxText had its loss.
    assert main.main(["report", str(directory)]) == 0
    page = (directory / "report.html").read_text()
    for step, loss in enumerate(["5", "4.875", "4.75", "4.625"]):
        assert f"<td>{step + 1}</td><td>{loss}</td>" in page


def test_it_continues_in_its_own_checkpoints_here_and_in_a_sidecar(
    installed, run, capsys
):
    whole = list(our_batches(installed, [8] * 6 + [16]))
    assert equal(run(steps=2), whole[:2])
    assert equal(run(steps=4, colocated_python_data_input=True), whole[2:4])
    assert equal(run(steps=6), whole[4:6])
    assert "global batch" not in capsys.readouterr().out
    assert equal(run(steps=7, per_device_batch_size=2), whole[6:])
    line = (
        "global batch 8 -> 16 rows since step 6; set per_device_batch_size=1 to keep it"
    )
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("in_sidecar", [False, True])
def test_in_a_ramp_it_takes_our_batches_of_growing_size(
    installed, run, tmp_path, in_sidecar
):
    ramp = {
        "colocated_python_data_input": in_sidecar,
        "enable_rampup_batch_size": True,
        "per_device_batch_size": 3,
        "per_device_batch_size_increment": 1,
        "global_rampup_samples": 48,
    }
    whole = list(our_batches(installed, [8, 8, 8, 16, 16, 24, 24, 24]))
    # It continues within a stage, and after the last step of one.
    for begin, end in ((0, 4), (4, 5), (5, 8)):
        assert equal(run(steps=end, **ramp), whole[begin:end])
    audited = audit.RunAudit(str(tmp_path / "runs" / "first")).outcome()
    assert audited.num_identical_steps == audited.num_steps == 8


@pytest.mark.parametrize(
    "in_sidecar", [False, pytest.param(True, marks=pytest.mark.slow)]
)
def test_in_tiers_it_continues_from_ram_and_without_it_from_storage(
    installed, run, ram, capsys, in_sidecar
):
    # The stand-in would raise an error if it waited for GKE's replicator.
    keys = {**tiers(ram), "colocated_python_data_input": in_sidecar}
    whole = list(our_batches(installed, [8] * 6))
    assert equal(run(steps=2, **keys), whole[:2])
    capsys.readouterr()
    assert equal(run(steps=4, **keys), whole[2:4])
    assert "from this host's RAM" in capsys.readouterr().out
    shutil.rmtree(f"{ram}/first")
    assert equal(run(steps=6, **keys), whole[4:])
    assert "from persistent storage" in capsys.readouterr().out


@pytest.mark.slow
def test_in_tiers_a_failed_run_leaves_hosts_and_ram_to_the_next(
    run, ram, tmp_path, capfd, monkeypatch
):
    with monkeypatch.context() as patch:
        checkpoint.broken_storage(tmp_path / "checkpoints", patch)(errno.ENOSPC)
        run(code=1, **tiers(ram))
    assert "step 2 was due in persistent storage" in last_line(capfd)
    run(code=1, steps=9, **tiers(ram), max_target_length=32)
    saved = "a different pipeline (max_target_length: saved 24, now 32)"
    assert saved in last_line(capfd)
    # It goes on from RAM, and its next last step gets to storage.
    assert len(run(steps=5, **tiers(ram))) == 2
    assert (tmp_path / "checkpoints" / "4").is_dir()


def test_a_world_that_is_left_saves_and_its_supervisor_keeps_the_events(
    installed, tmp_path, monkeypatch
):
    monkeypatch.setattr(program(), "SAVES_STEPS", True)
    told = RecordedEvents()
    this = ec.elastic.World(
        number=1,
        slices=(0,),
        slice_name="0",
        emit=told,
        leaving=lambda step: "resume" if step == 3 else None,
    )
    given = stand_in.arguments(installed, tmp_path, steps=9)
    maxtext.run(given, world=this)
    assert [fields["step"] for fields in told.named("step")] == [1, 2, 3]
    assert told.events[-1] == ("run_stopped", {"step": 3, "saved": True})
    assert (tmp_path / "checkpoints" / "2").is_dir()
    assert not (tmp_path / "runs" / "first" / "events.jsonl").exists()


def test_a_process_that_joined_no_service_saves_on_sigterm(
    installed, tmp_path, monkeypatch
):
    monkeypatch.setattr(program(), "SAVES_STEPS", True)
    told = RecordedEvents()

    def emit(name, **fields):
        told(name, **fields)
        if (name, fields.get("step")) == ("step", 3):
            os.kill(os.getpid(), signal.SIGTERM)

    # A thread learns of the signal while steps go on.
    given = stand_in.arguments(installed, tmp_path, steps=500)
    assert maxtext.run(given, emit=emit)
    name, fields = told.events[-1]
    assert (name, fields["saved"]) == ("run_stopped", True)
    assert (tmp_path / "checkpoints" / str(fields["step"] - 1)).is_dir()
    more = stand_in.arguments(installed, tmp_path, steps=fields["step"] + 1)
    assert not maxtext.run(more, emit=emit)
    assert told.named("step")[-1]["step"] == fields["step"] + 1


def test_its_evaluation_begins_anew_and_padding_weighs_nothing(installed, run):
    made = run(steps=1, eval_interval=1, grain_eval_files=f"{installed}/held_out")[1:]
    for batch in made:
        assert batch.keys() == set(maxtext.FEATURES)
        assert not batch["targets"][batch["targets_segmentation"] == 0].any()
    tokens = sum((batch["targets_segmentation"] > 0).sum() for batch in made)
    # A text, between its begin and end token, has a target for each token but one.
    assert tokens == sum(len(f"held out {number}") + 1 for number in range(13))


def test_only_the_end_of_the_data_ends_a_run_well(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(program(), "SAVES_STEPS", True)
    keys = {"steps": 1000, "num_epoch": 1, "packing": False, "checkpoint_period": 1}
    losses = run(**keys)
    assert "Training stopped" in capsys.readouterr().out
    rows = sum((b["targets_segmentation"] > 0).any(axis=1).sum() for b in losses)
    # Every ninth text is empty: begin and end token alone make an example too.
    assert rows == 60
    # So it does at once when the run is started again.
    assert not run(**keys)
    events = (tmp_path / "runs" / "first" / "events.jsonl").read_text().splitlines()
    last = json.loads(events[-1])
    assert (last["event"], last["step"]) == ("run_finished", len(losses))
    capsys.readouterr()
    run(code=1, train_data_columns="body", checkpoint_dir=f"{tmp_path}/other")
    printed = capsys.readouterr()
    assert "Training stopped" not in printed.out
    assert printed.err.startswith("elastic-ckpt maxtext: ")
    assert "no feature ['body']" in printed.err


def test_only_the_elastic_mode_of_maxtext_gets_a_lost_slice():
    def lost(_):
        raise jax.errors.JaxRuntimeError("a slice is gone")

    for elastic, error in (
        (True, jax.errors.JaxRuntimeError),
        (False, maxtext.PastMaxText),
    ):
        config = stand_in.config(elastic_enabled=elastic)
        with pytest.raises(error, match="a slice is gone"):
            next(maxtext.Data(None, lost, config))


def test_maxtext_s_refusals_end_as_it_wants_and_ours_in_one_line(run, capsys):
    with pytest.raises(SystemExit) as ended:
        run(vocab_size=-1)
    assert ended.value.code == 2
    assert "vocab_size is negative" in capsys.readouterr().out
    run(code=errors.CONFIG_EXIT_CODE, num_logical_shards=0)
    printed = capsys.readouterr()
    assert "MAXTEXT CONFIG ERROR" not in printed.out
    assert printed.err.startswith("elastic-ckpt maxtext: MaxText's configuration: num_")


def test_a_resume_with_other_data_or_another_model_is_refused(
    installed, run, capfd, monkeypatch
):
    run()

    def refusal(**settings):
        run(code=1, steps=9, **settings)
        line = last_line(capfd)
        assert line.startswith("elastic-ckpt maxtext: ")
        return line

    for in_sidecar in (False, True):
        place = {"colocated_python_data_input": in_sidecar}
        said = refusal(max_target_length=32, **place)
        assert "a different pipeline (max_target_length: saved 24, now 32)" in said
    said = refusal(num_logical_shards=16)
    assert "a different pipeline (num_logical_shards: saved 8, now 16)" in said
    said = refusal(grain_train_files=f"{installed}/held_out")
    assert "datasets: saved ['texts'], now ['held_out']" in said

    with monkeypatch.context() as patch:
        # The model restores into another shape now.
        checkpointing = importlib.import_module("maxtext.common.checkpointing")
        patch.setattr(checkpointing, "SHAPE", (7,))
        line = refusal()
    assert "step 2 is a checkpoint of a different model" in line

    assert len(run(steps=9)) == 6


@pytest.mark.parametrize(
    ("place", "why"),
    [(None, "'iter'"), ("process_0-of-1.json", "data state .*/2/iter")],
)
def test_a_step_of_stock_maxtext_is_refused(run, tmp_path, capfd, place, why):
    """Its place in the data is unknown here."""
    with ocp.training.Checkpointer(tmp_path / "checkpoints") as stock:
        stock.save_checkpointables(2, {"items": {"step": np.asarray(2)}})
    if place:
        (tmp_path / "checkpoints/2/iter").mkdir()
        (tmp_path / "checkpoints/2/iter" / place).write_text('{"next_index": 16}')
    run(code=1, steps=9)
    assert re.search(why, last_line(capfd))


def test_it_serves_metrics_to_prometheus(run, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(program(), "FETCHES", f"http://127.0.0.1:{port}/metrics")
    run(steps=2, prometheus_port=port)
    assert "\nelastic_ckpt_data_load_seconds" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    run(prometheus_port=port, code=errors.CONFIG_EXIT_CODE)
    assert "pip install '.[prometheus]'" in capsys.readouterr().err
