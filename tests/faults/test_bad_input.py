"""Bad input of a run: one clear error, nothing changed."""

import json
import pathlib
import shutil

import pytest

from elastic_ckpt.core import errors, storage
from tests import corpora, runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    """A run of 4 steps on one host, with its configuration."""
    directory = tmp_path_factory.mktemp("trained")
    config = runs.write_config(directory, corpus, steps=4)
    ended = runs.cli("train", config)
    assert ended.returncode == 0, ended.stderr
    return config


def files(run: pathlib.Path):
    """Everything that a run saved: not its logs, which may grow."""
    kept = [run / "checkpoints", run / "step_log", run / "config.json"]
    paths = [p for root in kept for p in [root, *root.rglob("*")] if p.is_file()]
    return {path: path.read_bytes() for path in paths}


def refuse(config, *overrides, code=1):
    """Starts a run that has to be refused, and returns its one error."""
    run = config.parent / "tiny"
    before = files(run)
    ended = runs.cli("train", config, *overrides)
    assert ended.returncode == code, ended.stdout
    assert ended.stderr.startswith("elastic-ckpt train: ")
    assert ended.stderr.count("\n") == 1, ended.stderr
    assert "Traceback" not in ended.stdout
    assert files(run) == before
    return ended.stderr


def wrong(config, *overrides):
    """As `refuse`, for a configuration with which each start would end so."""
    return refuse(config, *overrides, code=errors.CONFIG_EXIT_CODE)


@pytest.mark.slow
def test_a_mistyped_key(trained):
    assert "unknown key 'hots'; the nearest key is 'hosts'" in wrong(trained, "hots=2")


def test_no_run_name(trained):
    assert "run_name is empty; set it" in wrong(trained, "run_name=")


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_ram_directory_that_cannot_be_made(trained, hosts):
    message = refuse(
        trained,
        f"hosts={hosts}",
        "enable_multi_tier_checkpointing=true",
        "local_checkpoint_directory=/proc/x",
        "local_checkpoint_period=2",
        "multi_tier_checkpointing_backup_interval_steps=4",
    )
    assert "the RAM directory /proc/x" in message
    assert "cannot be made (No such file or directory); set local_check" in message


def test_missing_data(trained):
    message = refuse(trained, "grain_train_files=/nowhere/*.array_record")
    assert (
        "/nowhere/*.array_record matches no file; check the path, or write one with"
        in message
    )


def test_a_pattern_is_not_taken_for_a_file_to_write(trained, tmp_path):
    pattern = f"{tmp_path}/*.array_record"
    message = refuse(
        trained, f"grain_train_files={pattern}", "text_directory=python-stdlib"
    )
    assert "*.array_record matches no file" in message
    assert not list(tmp_path.iterdir())


def test_texts_are_not_written_as_another_format_than_their_name_has(trained, tmp_path):
    file = f"{tmp_path}/texts.parquet"
    message = wrong(
        trained, f"grain_train_files={file}", "text_directory=python-stdlib"
    )
    assert "set grain_file_type=parquet, or change" in message
    assert not list(tmp_path.iterdir())


def test_empty_data(trained, tmp_path):
    empty = corpora.write_texts(tmp_path / "empty", num_texts=0)
    assert "not one record" in refuse(trained, f"grain_train_files={empty}")


def test_a_number_of_hosts_that_does_not_divide_the_batch(trained):
    message = wrong(trained, "hosts=3")
    assert (
        "a global batch of 8 rows cannot be divided evenly among 3 devices, as JAX"
        in message
    )


def test_more_hosts_than_the_local_launcher_can_give_an_accelerator(trained):
    message = wrong(trained, "hosts=2", "hardware=tpu")
    assert "start one process per host with Slurm or a JobSet" in message


def test_fewer_steps_than_the_run_has_trained(trained):
    message = wrong(trained, "steps=3")
    assert "tiny is already at step 4: steps counts over all starts" in message
    assert "set it above 4 to continue" in message


@pytest.mark.slow
def test_a_checkpoint_of_another_model(trained):
    message = refuse(trained, "base_mlp_dim=48", "steps=8")
    assert "step 4 is a checkpoint of another model: " in message
    assert "saved [1, 16, 64], now [1, 16, 96]" in message


def test_a_checkpoint_of_another_pipeline(trained):
    message = refuse(trained, "data_shuffle_seed=3", "steps=8")
    assert "saved by another pipeline (data_shuffle_seed: saved 0, now 3)" in message


def test_a_checkpoint_of_another_pipeline_on_two_hosts(trained):
    message = refuse(trained, "max_target_length=17", "hosts=2", "steps=8")
    assert "another pipeline (max_target_length: saved 16, now 17)" in message


def test_a_run_that_another_live_run_is_writing(trained):
    with storage.exclusive_lock(trained.parent / "tiny" / "run.lock"):
        message = refuse(trained, "steps=8")
    assert "tiny is being written by another live run (process" in message
    assert "wait for it, stop it, or use another directory" in message


@pytest.fixture
def data_state(trained):
    path = trained.parent / "tiny" / "checkpoints" / "4" / "data" / "data_state.json"
    content = path.read_bytes()
    yield path
    path.write_bytes(content)


@pytest.mark.slow
def test_a_data_state_that_is_missing_cut_short_or_not_json(trained, data_state):
    content = data_state.read_bytes()
    problem = "step 4: no good copy of data/data_state.json is left (at"
    for spoilt in (content[:50], b"nonsense", None):
        if spoilt is None:
            data_state.unlink()
        else:
            data_state.write_bytes(spoilt)
        message = refuse(trained, "steps=8")
        assert problem in message
        assert "restore it from a copy" in message


@pytest.mark.slow
def test_a_spoilt_step_is_passed_over_for_the_one_before(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, steps=4, checkpoint_period=2)
    assert runs.cli("train", config).returncode == 0
    step = tmp_path / "tiny" / "checkpoints" / "4"
    (step / "data" / "data_state.json").unlink()
    ended = runs.cli("train", config, "steps=6")
    assert ended.returncode == 0, ended.stderr
    assert "no good copy of data/data_state.json is left" in ended.stdout
    assert "restored step 2" in ended.stdout
    assert "PASSED" in runs.verb("audit", tmp_path / "tiny")


def copy_step(config, name):
    checkpoints = config.parent / "tiny" / "checkpoints"
    shutil.copytree(checkpoints / "4", checkpoints / name)
    return checkpoints / name


@pytest.mark.slow
def test_a_step_under_another_name(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, steps=4)
    assert runs.cli("train", config).returncode == 0
    step = copy_step(config, "6")
    ended = runs.cli("train", config, "steps=8")
    assert ended.returncode == 0, ended.stderr
    assert (
        f"passed over: step 6 has no manifest that can be read (manifest {step}/"
        in (ended.stdout)
    )
    assert "is that of run 'tiny', step 4" in ended.stdout
    assert "restored step 4" in ended.stdout


@pytest.mark.slow
def test_a_step_without_its_values(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, steps=4)
    assert runs.cli("train", config).returncode == 0
    shutil.rmtree(tmp_path / "tiny" / "checkpoints" / "4" / "state")
    message = refuse(config, "steps=8")
    assert "no step is complete in any tier" in message
    assert "restore it from a copy" in message


def test_a_run_that_is_done_says_so_and_changes_no_checkpoint(trained):
    before = files(trained.parent / "tiny" / "checkpoints")
    ended = runs.cli("train", trained)
    assert ended.returncode == 0
    assert "step 4 is done" in ended.stdout
    assert files(trained.parent / "tiny" / "checkpoints") == before


def test_an_audit_of_no_run(trained, tmp_path):
    assert "is not the directory of a run" in runs.verb("audit", tmp_path, code=1)
    run = tmp_path / "copy"
    (run / "step_log").mkdir(parents=True)
    (run / "config.json").write_bytes(
        (trained.parent / "tiny" / "config.json").read_bytes()
    )
    assert "no step log in it" in runs.verb("audit", run, code=1)


@pytest.mark.slow
def test_a_forged_step_log_fails_the_audit_with_the_first_difference(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, steps=3, enable_checkpointing=False)
    assert runs.cli("train", config).returncode == 0
    path = tmp_path / "tiny" / "step_log" / "attempt-00001.jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[2])
    lost = record["ids"][1]
    record["ids"][1] = (lost + 1) % 100
    path.write_text("\n".join([*lines[:2], json.dumps(record), *lines[3:]]) + "\n")
    output = runs.verb("audit", tmp_path / "tiny", code=1)
    assert "FAILED: step 1, row 1: example" in output
    assert f"[{lost}]" in output
