import json
import logging
import os
import re
import shutil
import socket
import sys

import jax
import numpy as np
import pytest
from absl import logging as absl_logging

from elastic_ckpt.cli import main
from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import data_keys, iterator
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.integrations import maxtext, maxtext_seam
from elastic_ckpt.training import run_audit
from tests import corpora, shared_memory
from tests.checkpoint import test_run_saver
from tests.integrations import stand_in


@pytest.fixture(autouse=True)
def no_maxtext_or_logging_is_left():
    handlers, verbosity = logging.root.handlers[:], absl_logging.get_verbosity()
    stand_in.forget()
    yield
    stand_in.forget()
    logging.root.handlers[:] = handlers
    absl_logging.set_verbosity(verbosity)


@pytest.fixture
def install(tmp_path, monkeypatch):
    def installed(**changes):
        stand_in.install(tmp_path, **changes)
        monkeypatch.syspath_prepend(tmp_path)

    return installed


@pytest.fixture
def files(tmp_path):
    texts = [{"text": f"text {number} " * (number % 9)} for number in range(60)]
    held_out = [{"text": f"held out {number}"} for number in range(13)]
    corpora.write_arrayrecord(tmp_path / "texts", texts)
    corpora.write_arrayrecord(tmp_path / "held_out", held_out)
    return tmp_path


def arguments(files, **settings):
    keys = {
        "base_output_directory": f"{files}/runs",
        "checkpoint_dir": f"{files}/checkpoints",
        "grain_train_files": f"{files}/texts",
        "grain_worker_count": 0,
        "num_epoch": 0,
        "num_logical_shards": 8,
        "tokenizer_type": "bytes",
        "max_target_length": 24,
        "per_device_batch_size": 1,
        "eval_per_device_batch_size": 1,
        "packing": True,
        **settings,
    }
    return ["maxtext", *(f"{key}={value}" for key, value in keys.items())]


def trained(*parts, code=0, **settings):
    """The batches of a run of the stand-in, as NumPy arrays."""
    assert main.main([*arguments(*parts, **settings)]) == code
    train = __import__("maxtext.trainers.pre_train.train", fromlist=["BATCHES"])
    return [jax.tree.map(np.asarray, batch) for batch in train.BATCHES]


def equal(left, right):
    return jax.tree.all(jax.tree.map(np.array_equal, left, right))


def test_without_maxtext_the_way_to_it_is_named(files, capsys):
    assert main.main(arguments(files)) == errors.CONFIG_EXIT_CODE
    assert capsys.readouterr().err == (
        "elastic-ckpt maxtext: MaxText is not installed beside elastic_ckpt; make the"
        " environment that docs/pages/guides/maxtext.md describes, and run this"
        " in it\n"
    )


def test_its_steps_take_our_batches_without_the_features_that_it_does_not_know(
    install, files
):
    install()
    losses = trained(files)
    data = pipeline.from_config(
        data_keys.DataKeys(
            grain_train_files=f"{files}/texts",
            grain_record_format="tf_example",
            num_logical_shards=8,
            max_target_length=24,
            packing=True,
        )
    )
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    ours = iterator.Batches(data, mesh=mesh, global_batch_size=8)
    expected = [next(ours) for _ in range(3)]
    assert all(batch.pop("example_id").shape == (8, 2) for batch in expected)
    assert equal(losses, expected)
    assert {name: (x.shape, x.dtype) for name, x in losses[0].items()} == dict.fromkeys(
        maxtext.FEATURES, ((8, 24), np.int32)
    )


@pytest.mark.slow
@pytest.mark.parametrize("in_sidecar", [False, True])
def test_it_saves_and_continues_in_its_own_checkpoints(install, files, in_sidecar):
    install()
    place = {"colocated_python_data_input": in_sidecar}
    whole = trained(files, steps=9, checkpoint_dir=f"{files}/whole")
    assert equal(trained(files, steps=4, **place), whole[:4])
    assert equal(trained(files, steps=9, **place), whole[4:])


RAMP = {
    "enable_rampup_batch_size": True,
    "per_device_batch_size": 3,
    "per_device_batch_size_increment": 1,
    "global_rampup_samples": 48,
}


@pytest.mark.parametrize("in_sidecar", [False, True])
@pytest.mark.slow
def test_in_a_ramp_its_steps_take_our_batches_of_growing_size(
    install, files, in_sidecar
):
    install()
    place = {"colocated_python_data_input": in_sidecar}
    whole = trained(files, steps=8, checkpoint_dir=f"{files}/whole", **RAMP)
    data = pipeline.from_config(
        data_keys.DataKeys(
            grain_train_files=f"{files}/texts",
            grain_record_format="tf_example",
            num_logical_shards=8,
            max_target_length=24,
            packing=True,
        )
    )
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    ours = iterator.Batches(data, mesh=mesh, global_batch_size=8)
    for batch, size in zip(whole, [8, 8, 8, 16, 16, 24, 24, 24], strict=True):
        ours.resize(size)
        expected = next(ours)
        del expected["example_id"]
        assert equal(batch, expected)
    ours.close()
    # It continues within a stage, and after the last step of one.
    for begin, end in ((0, 4), (4, 5), (5, 8)):
        assert equal(trained(files, steps=end, **RAMP, **place), whole[begin:end])
    audited = run_audit.RunAudit(
        f"{files}/runs/{stand_in.FIELDS['run_name']}"
    ).outcome()
    assert audited.num_row_identical_steps == audited.num_steps == 8


def tiers(ram, **settings):
    return {
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": ram,
        "local_checkpoint_period": 100,
        "local_checkpoint_size_limit": "64Mi",
        "multi_tier_checkpointing_backup_interval_steps": 100,
        **settings,
    }


@pytest.mark.parametrize("in_sidecar", [False, True])
@pytest.mark.slow
def test_in_tiers_it_continues_from_ram_and_without_it_from_storage(
    install, files, capsys, in_sidecar
):
    install()
    place = {"colocated_python_data_input": in_sidecar}
    whole = trained(files, steps=9, checkpoint_dir=f"{files}/whole")
    with shared_memory.directory("maxtext") as ram:
        assert equal(trained(files, steps=4, **tiers(ram), **place), whole[:4])
        capsys.readouterr()
        assert equal(trained(files, steps=7, **tiers(ram), **place), whole[4:7])
        assert "from this host's RAM" in capsys.readouterr().out
        shutil.rmtree(f"{ram}/first")
        assert equal(trained(files, steps=9, **tiers(ram), **place), whole[7:])
        assert "from persistent storage" in capsys.readouterr().out


@pytest.mark.slow
def test_in_tiers_other_data_is_one_line_and_nothing_waits(install, files, capfd):
    install()
    with shared_memory.directory("maxtext") as ram:
        trained(files, **tiers(ram))
        capfd.readouterr()
        other = {"max_target_length": 32, "steps": 9}
        assert main.main(arguments(files, **tiers(ram), **other)) == 1
        (line,) = printed_lines(capfd)
        assert "another pipeline (max_target_length: saved 24, now 32)" in line
        # The hosts and the RAM disk are free again.
        assert len(trained(files, steps=9, **tiers(ram))) == 6


@pytest.mark.slow
def test_in_tiers_a_last_step_that_is_not_in_storage_is_an_error(
    install, files, capfd, monkeypatch
):
    install()
    with shared_memory.directory("maxtext") as ram:
        write = storage.write_atomic
        full = test_run_saver.fill(files / "checkpoints")
        monkeypatch.setattr(storage, "write_atomic", full)
        assert main.main(arguments(files, **tiers(ram))) == 1
        assert "step 2 was due in persistent storage" in printed_lines(capfd)[-1]
        monkeypatch.setattr(storage, "write_atomic", write)
        # It goes on from RAM, and its next last step gets there.
        assert len(trained(files, steps=5, **tiers(ram))) == 2
        assert (files / "checkpoints" / "4").is_dir()


def test_tiers_that_do_not_fit_together_are_one_line(install, files, capfd):
    install()
    both = tiers("/dev/shm", multi_tier_checkpointing_backup_interval_minutes=3)
    assert main.main(arguments(files, **both)) == errors.CONFIG_EXIT_CODE
    (line,) = printed_lines(capfd)
    assert "not both: it is the interval between backups" in line


def test_its_evaluation_begins_anew_and_padding_weighs_nothing(install, files):
    install()
    losses = trained(
        files, steps=1, eval_interval=1, grain_eval_files=f"{files}/held_out"
    )[1:]
    weights = [(b["targets_segmentation"] > 0).any(axis=1) for b in losses]
    assert sum(map(np.sum, weights)) <= 13
    for batch in losses:
        assert batch.keys() == set(maxtext.FEATURES)
        assert not batch["targets"][batch["targets_segmentation"] == 0].any()
    tokens = sum((batch["targets_segmentation"] > 0).sum() for batch in losses)
    # A text, between its begin and end token, has a target for each token but one.
    assert tokens == sum(len(f"held out {number}") + 1 for number in range(13))


def test_its_own_functions_are_back_afterwards(install, files):
    install()
    trained(files)
    for tie in maxtext_seam.ties():
        assert tie.look_up().__module__.startswith("maxtext.")


def test_its_hosts_do_not_wait_for_the_replicator_of_gke(install, files):
    install()
    with shared_memory.directory("maxtext") as ram:
        # The stand-in would raise an error.
        assert trained(files, **tiers(ram))


def test_an_error_of_the_data_is_not_taken_for_its_end(install, files, capsys):
    install()
    trained(files, code=1, train_data_columns="body")
    printed = capsys.readouterr()
    assert "Training stopped" not in printed.out
    assert printed.err.startswith("elastic-ckpt maxtext: ")
    assert "no feature ['body']" in printed.err


def test_the_end_of_the_data_is(install, files, capsys):
    install()
    losses = trained(files, steps=1000, num_epoch=1, packing=False)
    assert "Training stopped" in capsys.readouterr().out
    rows = sum((b["targets_segmentation"] > 0).any(axis=1).sum() for b in losses)
    # Every ninth text is empty: begin and end token alone make an example too.
    assert rows == 60


# RAM has the last step already, or it does not.
@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 100])
def test_the_last_step_of_data_that_ends_is_in_every_tier(
    install, files, capsys, period
):
    install(train=("SAVES_STEPS = False", "SAVES_STEPS = True"))
    ends = {"steps": 1000, "num_epoch": 1, "packing": False}
    with shared_memory.directory("maxtext") as ram:
        chosen = tiers(ram, local_checkpoint_period=period)
        last = len(trained(files, **ends, **chosen)) - 1
        assert f"the data ended after step {last + 1}" in capsys.readouterr().out
        assert (files / "checkpoints" / str(last) / "items").exists()
        assert trained(files, **ends, **chosen) == []
        shutil.rmtree(f"{ram}/first")
        assert trained(files, **ends, **chosen) == []


def test_a_lost_slice_is_left_to_maxtext_s_elastic_mode_alone():
    class Lost:
        def __next__(self):
            raise jax.errors.JaxRuntimeError("a slice is gone")

    with pytest.raises(jax.errors.JaxRuntimeError):
        next(maxtext.MaxTextIterator(Lost(), elastic=True))
    with pytest.raises(maxtext.PastMaxText, match="a slice is gone"):
        next(maxtext.MaxTextIterator(Lost(), elastic=False))


def test_our_refusals_are_not_printed_as_maxtext_s(install, files, capsys):
    install()
    assert main.main(arguments(files, num_logical_shards=0)) == errors.CONFIG_EXIT_CODE
    printed = capsys.readouterr()
    assert "MAXTEXT CONFIG ERROR" not in printed.out
    assert printed.err.startswith("elastic-ckpt maxtext: MaxText's configuration: num_")


def test_its_own_refusals_end_as_it_wants(install, files, capsys):
    install()
    with pytest.raises(SystemExit) as ended:
        main.main(arguments(files, vocab_size=-1))
    assert ended.value.code == 2
    assert "vocab_size is negative" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"grain_tran_files": "x"},
            "unknown key 'grain_tran_files'.*grain_train_files",
        ),
        (
            {"num_logical_shard": 8},
            "unknown key 'num_logical_shard'.*num_logical_shards",
        ),
        (
            {"dataset_type": "synthetic"},
            "dataset_type=synthetic is data that MaxText generates",
        ),
        ({"elastic_enabled": True}, "elastic_enabled=true without hosts"),
        (
            # MaxText shards its batch over the devices before it asks for the data.
            {"per_device_batch_size": 1.5},
            "per_device_batch_size=1.5 makes a global batch of 12 rows",
        ),
        (
            {
                "eval_interval": 1,
                "eval_per_device_batch_size": 1.5,
            },
            "eval_per_device_batch_size=1.5 makes a global batch of 12 rows",
        ),
        (
            {"global_batch_size": 16},
            "global_batch_size has no effect: .* is per_device_batch_size times",
        ),
        (
            {"global_batch_size_to_load_eval": 16},
            "_eval has no effect: .* is eval_per_device_batch_size times",
        ),
    ],
)
def test_a_likely_mistake_is_one_line(install, files, capsys, settings, message):
    install()
    assert main.main(arguments(files, **settings)) == errors.CONFIG_EXIT_CODE
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grain_tran_files": "x"}, "unknown key 'grain_tran_files'"),
        ({"grain_train_files": "/absent/*"}, "/absent/\\* matches no file"),
        ({"grain_eval_files": "/absent"}, "grain_eval_files: /absent matches no file"),
    ],
)
def test_keys_and_files_are_checked_before_the_program_is_imported(
    install, files, capsys, settings, message
):
    install(train=("import ast", "raise AssertionError('it takes long')"))
    assert main.main(arguments(files, **settings)) in (1, errors.CONFIG_EXIT_CODE)
    assert re.search(message, capsys.readouterr().err)


def test_weights_of_hugging_face_are_refused_with_the_way_to_convert_them(
    install, files, capsys
):
    install()
    (files / "weights").mkdir()
    (files / "weights" / "model-00001-of-00002.safetensors").touch()
    given = {"load_parameters_path": f"{files}/weights"}
    assert main.main(arguments(files, **given)) == errors.CONFIG_EXIT_CODE
    (line,) = capsys.readouterr().err.splitlines()
    assert "these are Hugging Face weights; run `elastic-ckpt convert" in line


def test_config_names_the_verb_of_a_file_with_keys_of_maxtext(install, files, capsys):
    install()
    path = files / "tiny.yml"
    path.write_text("run_name: a\nuse_multimodal: false\nnum_logical_shards: 8\n")
    assert main.main(["config", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path} has keys of MaxText, such as use_multimodal" in line
    assert f"`elastic-ckpt maxtext {path}` runs it" in line
    assert "num_logical_shards, " in line
    path.write_text("run_name: a\nstepz: 3\n")
    assert main.main(["config", str(path)]) == 1
    assert "unknown key 'stepz'; the nearest key is 'steps'" in capsys.readouterr().err


def test_tokenizers_of_maxtext_are_looked_for_in_its_package(
    install, files, monkeypatch
):
    # So that it is gone afterwards, too.
    monkeypatch.setenv("MAXTEXT_ASSETS_ROOT", "")
    monkeypatch.delenv("MAXTEXT_ASSETS_ROOT")
    (files / "maxtext" / "assets").mkdir(parents=True)
    install()
    trained(files)
    assert os.environ["MAXTEXT_ASSETS_ROOT"] == str(files / "maxtext" / "assets")


def test_a_ram_directory_that_cannot_be_made_is_named_with_its_key(
    install, files, capfd
):
    install()
    settings = tiers("/proc/x", multi_tier_checkpointing_backup_interval_steps=2)
    assert main.main(arguments(files, **settings)) == 1
    (line,) = printed_lines(capfd)
    assert re.search("/proc/x.* cannot be made .*local_checkpoint_directory", line)


def test_a_pattern_without_files_names_no_key_that_maxtext_refuses(
    install, files, capsys
):
    install()
    assert main.main(arguments(files, grain_train_files="/absent/*")) == 1
    line = capsys.readouterr().err
    assert "grain_train_files: /absent/* matches no file" in line
    assert "text_directory" not in line


@pytest.mark.parametrize("workers", [0, 1])
def test_texts_that_are_taken_for_tf_examples_are_one_line(
    install, files, capfd, workers
):
    install()
    text = files / "plain.jsonl"
    text.write_text('{"text": "a plain text"}\n' * 50)
    assert main.main(["data", str(text), f"{files}/plain"]) == 0
    assert "grain_record_format=bytes" in capfd.readouterr().out
    given = {"grain_train_files": f"{files}/plain", "grain_worker_count": workers}
    assert main.main(arguments(files, **given)) == 1
    (line,) = printed_lines(capfd)
    assert f"{files}/plain, record " in line
    assert "not a tf.Example" in line
    assert "set grain_record_format=bytes" in line


def test_a_vocabulary_that_is_too_small_is_refused_before_the_first_step(
    install, files, capsys
):
    install()
    assert main.main(arguments(files, vocab_size=258)) == errors.CONFIG_EXIT_CODE
    assert "vocab_size=258, but the tokenizer has 259" in capsys.readouterr().err


def test_a_step_without_data_state_is_not_continued_from(install, files, capsys):
    install()
    trained(files)
    (files / "checkpoints" / "2" / "iter").rename(files / "gone")
    assert main.main(arguments(files, steps=9)) == 1
    message = capsys.readouterr().err
    assert f"step 2 in {files}/checkpoints has no data state" in message
    assert f"set load_full_state_path={files}/checkpoints/2/items and" in message


def test_a_step_that_maxtext_s_own_iterator_saved_is_not_continued_from(
    install, files, capsys
):
    install()
    trained(files)
    theirs = files / "checkpoints" / "2" / "iter"
    shutil.rmtree(theirs)
    theirs.mkdir()
    (theirs / "process_0-of-1.json").write_text('{"next_index": 16}')
    assert main.main(arguments(files, steps=9)) == 1
    assert capsys.readouterr().err == (
        f"elastic-ckpt maxtext: step 2 in {files}/checkpoints was saved by MaxText's"
        " own iterator, whose place in the data is another; to go on from its weights,"
        " and with the data from the beginning, set"
        f" load_full_state_path={files}/checkpoints/2/items and another run_name\n"
    )


def test_a_model_that_has_changed_is_one_line_with_both_shapes(install, files, capfd):
    install()
    trained(files)
    # It restores into another shape now.
    module = files / "maxtext" / "common" / "checkpointing.py"
    changed = module.read_text().replace(
        "np.zeros((), int)", "jax.numpy.zeros((7,), int)"
    )
    module.write_text(f"import jax\n{changed}")
    stand_in.forget()
    capfd.readouterr()
    assert main.main(arguments(files, steps=9)) == 1
    (line,) = printed_lines(capfd)
    assert line.startswith(
        f"elastic-ckpt maxtext: {files}/checkpoints/2 cannot be restored: Requested"
        " shape: (7,) is not compatible with the stored shape: ()"
    )
    assert line.endswith("set its keys as they were, or another run_name")


@pytest.mark.parametrize("in_sidecar", [False, True])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_target_length": 32}, "(max_target_length: saved 24, now 32)"),
        ({"num_logical_shards": 16}, "(num_logical_shards: saved 8, now 16)"),
        ({"grain_train_files": "{}/held_out"}, "texts is gone"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_resume_with_other_data_is_one_line(
    install, files, capfd, in_sidecar, changed, message
):
    install()
    place = {"colocated_python_data_input": in_sidecar}
    trained(files, **place)
    changed = {
        key: value.format(files) if isinstance(value, str) else value
        for key, value in changed.items()
    }
    capfd.readouterr()
    assert main.main(arguments(files, steps=9, **place, **changed)) == 1
    (line,) = printed_lines(capfd)
    assert line.startswith("elastic-ckpt maxtext: ")
    assert "the data state was saved by another pipeline (" in line
    assert message in line


def test_a_resume_from_a_data_state_that_was_changed_is_one_line(install, files, capfd):
    install()
    trained(files)
    saved = files / "checkpoints" / "2" / "iter" / "data_state.json"
    text = saved.read_text()
    assert '"stream_row":24' in text
    saved.write_text(text.replace('"stream_row":24', '"stream_row":16'))
    capfd.readouterr()
    assert main.main(arguments(files, steps=9)) == 1
    (line,) = printed_lines(capfd)
    assert line.startswith(f"elastic-ckpt maxtext: data state {saved} ")
    assert "restore the file from a copy" in line


@pytest.mark.slow
def test_a_report_has_the_losses_that_came_after_their_steps_were_saved(install, files):
    install(train=("SAVES_STEPS = False", "SAVES_STEPS = True"))
    trained(files, steps=4)
    run = files / "runs" / "first"
    for options in ([], ["--no-audit"]):
        assert main.main(["report", str(run), *options]) == 0
        page = (run / "report.html").read_text()
        for step, loss in enumerate(["5", "4.875", "4.75", "4.625"]):
            assert f"<td>{step + 1}</td><td>{loss}</td>" in page
        assert "4.6250" in page
    # What was never reported is left out.
    shutil.rmtree(run / "metrics")
    assert main.main(["report", str(run), "--no-audit"]) == 0
    assert "nan" not in (run / "report.html").read_text()


FETCHED = """    BATCHES.clear()
    from urllib import request
    with request.urlopen("http://127.0.0.1:{port}/metrics") as page:
        print(page.read().decode())
"""


def test_it_serves_metrics_to_prometheus(install, files, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    install(train=("    BATCHES.clear()\n", FETCHED.format(port=port)))
    trained(files, steps=2, prometheus_port=port)
    assert "\nelastic_ckpt_data_load_seconds" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    trained(files, prometheus_port=port, code=errors.CONFIG_EXIT_CODE)
    assert "pip install '.[prometheus]'" in capsys.readouterr().err


def test_inspect_shows_its_steps_and_components_says_what_they_lack(
    install, files, capsys
):
    install()
    run = f"{files}/runs/first"
    trained(files, steps=4, checkpoint_dir=f"{run}/checkpoints")
    capsys.readouterr()
    assert main.main(["inspect", run]) == 0
    shown = capsys.readouterr().out
    assert "step 3: 1 arrays, 8 bytes" in shown
    assert 'data: sharded, position {"stream_row": 32}' in shown
    assert "missing" not in shown
    assert main.main(["components", run]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the steps in {run}/checkpoints, 3 the newest, are Orbax's own" in line
    assert f"`elastic-ckpt inspect {run}`" in line


def test_status_counts_the_steps_that_are_done_and_no_loss_takes_storage(
    install, files, capsys
):
    install()
    run = f"{files}/runs/first"
    trained(files, steps=4, checkpoint_dir=f"{run}/checkpoints")
    with open(f"{run}/events.jsonl") as file:
        events = [json.loads(line)["event"] for line in file]
    assert events == ["run_started", "compiled", "run_finished"]
    capsys.readouterr()
    assert main.main(["status", run]) == 0
    screen = capsys.readouterr().out
    assert "step       4 of 4" in screen
    assert "in storage step 3\n" in screen
    # A supervisor's world, whose slices have no copies in RAM.
    with open(f"{run}/events.jsonl", "a") as file:
        chosen = {"event": "world_started", "world": 1, "slices": [0, 1], "spares": []}
        file.write(json.dumps({**chosen, "time": 0.0}) + "\n")
    assert main.main(["status", run]) == 0
    screen = capsys.readouterr().out
    assert "each restores step 3, 0 steps to train again" in screen
    assert "anew" not in screen


def test_a_batch_that_has_changed_is_said_with_the_key_that_keeps_it(
    install, files, capsys
):
    install()
    trained(files)
    trained(files, steps=5)
    assert "global batch" not in capsys.readouterr().out
    trained(files, steps=7, per_device_batch_size=2)
    line = "global batch 8 -> 16 rows since step 5; per_device_batch_size=1 keeps it"
    assert line in capsys.readouterr().out.splitlines()


def printed_lines(capfd):
    """The lines on the standard error, without log records of libraries."""
    lines = capfd.readouterr().err.splitlines()
    return [line for line in lines if not re.match(r"[IW]\d{4} ", line)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train": ("def main(argv)", "def run(argv)")},
            "has no maxtext.trainers.pre_train.train.main:",
        ),
        (
            {"input_pipeline_interface": ("(config, mesh)", "(config, devices)")},
            "calls maxtext.input_pipeline.input_pipeline_interface"
            ".create_data_iterator with config, devices instead of config, mesh:",
        ),
        (
            {"pyconfig": ("raw_keys = _prepare_for_pydantic(", "raw_keys = dict(")},
            "does not call _prepare_for_pydantic in"
            " maxtext.configs.pyconfig._initialize_pydantic:",
        ),
        (
            {"checkpointing": ("def load_state_if_possible(", "def load_state(")},
            "does not call PlaceHolderDataIterator in maxtext.common.checkpointing"
            ".load_state_if_possible:",
        ),
        (
            {
                "fields": {
                    key: value
                    for key, value in stand_in.FIELDS.items()
                    if key not in ("packing", "use_sft")
                }
            },
            "has no key packing, use_sft:",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_maxtext_whose_seam_has_moved_is_refused(
    install, files, capsys, change, message
):
    install(version="0.9", **change)
    assert main.main(arguments(files)) == errors.CONFIG_EXIT_CODE
    assert capsys.readouterr().err == (
        f"elastic-ckpt maxtext: MaxText 0.9 {message} elastic_ckpt supports MaxText"
        " 0.2.5; install maxtext==0.2.5 by docs/pages/guides/maxtext.md, or a"
        " newer elastic_ckpt\n"
    )


def test_a_module_that_is_gone_is_a_seam_that_has_moved(install, files, capsys):
    install()
    (files / "maxtext" / "utils" / "rampup_batch.py").unlink()
    (files / "maxtext" / "trainers" / "pre_train" / "train.py").write_text(
        "def main(argv): pass"
    )
    assert main.main(arguments(files)) == errors.CONFIG_EXIT_CODE
    missing = "has no maxtext.utils.rampup_batch.RampupBatchManager"
    assert missing in capsys.readouterr().err


def test_a_library_that_maxtext_lacks_is_not_taken_for_another_version(install):
    install(checkpointing=("import numpy", "import nowhere; import numpy"))
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        maxtext_seam.check_installed()


def test_errors_keep_their_class_on_the_way(install, files):
    install()
    with pytest.raises(errors.DataError):
        maxtext.run(arguments(files, train_data_columns="body")[1:])
