"""Bad data of a sharded run: one clear error, or a count; nothing saved is changed."""

import json
import re

import pytest

from tests import corpora, runs
from tests.faults.test_bad_input import files, refuse, wrong


def write(directory, name, numbers):
    texts = [{"text": f"text {number} " * 4} for number in numbers]
    return corpora.write_parquet(directory / name, texts)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A sharded run of 2 steps on one host, with its configuration."""
    directory = tmp_path_factory.mktemp("sharded")
    file = write(directory, "a.parquet", range(60))
    config = runs.write_config(
        directory,
        file,
        steps=2,
        grain_file_type="parquet",
        num_logical_shards=8,
        packing=True,
        grain_packing_type="concat_then_split",
        grain_shuffle_buffer_size=4,
        max_target_length=64,
        colocated_python_data_input=False,
    )
    ended = runs.cli("train", config)
    assert ended.returncode == 0, ended.stderr
    return config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("-1;{},2", "dataset x.parquet has the weight -1.0; weights are finite"),
        ("0;{},0", "all weights of ['a.parquet', 'x.parquet'] are 0; raise one"),
        ("1;{}", "has no weight; write patterns,weight;patterns,weight"),
    ],
)
def test_weights_that_cannot_be_meant(trained, weights, message):
    file = trained.parent / "a.parquet"
    listed = f"{trained.parent}/x.parquet,{weights.format(file)}"
    assert message in wrong(trained, f"grain_train_files={listed}")


def test_a_mixture_file_with_a_wrong_entry(trained, tmp_path):
    path = tmp_path / "mixture.json"
    path.write_text('{"web": {"files": "a", "weight": 1}}')
    message = wrong(trained, f"grain_train_mixture_config_path={path}")
    assert f"{path}: web has ['files', 'weight']; give it weight, and path" in message


@pytest.mark.slow
def test_a_changed_list_of_files_is_named(trained):
    other = write(trained.parent, "b.parquet", range(3))
    both = f"{trained.parent}/a.parquet,{other}"
    message = refuse(trained, f"grain_train_files={both}", "steps=4")
    assert "datasets.train.files: b.parquet is new" in message
    message = refuse(trained, f"grain_train_files={other}", "steps=4")
    assert "files: a.parquet is gone; datasets.train.files: b.parquet is new" in message


def test_a_pipeline_that_needs_logical_shards_says_so(trained):
    message = wrong(trained, "num_logical_shards=0")
    assert "grain_file_type=parquet needs logical shards; set num_logical" in message


def test_a_file_of_another_format_is_named(trained):
    message = refuse(trained, "grain_file_type=tfrecord")
    assert "a.parquet, byte 0: not a TFRecord file, or damaged there" in message


def test_a_wrong_column_is_named_with_those_that_exist(trained):
    message = refuse(trained, "train_data_columns=body")
    assert "a.parquet: no column ['body'], only ['text', 'tokens']" in message


@pytest.mark.slow
def test_a_corrupt_row_group_ends_the_run_or_is_left_out_and_counted(trained, tmp_path):
    values = json.loads(trained.read_text())
    file = write(tmp_path, "a.parquet", range(60))
    corpora.spoil(file, b"text 33 ")
    values |= {"grain_train_files": file, "base_output_directory": str(tmp_path)}
    config = tmp_path / "config.yml"
    # Less than eight epochs.
    config.write_text(json.dumps(values | {"steps": 24}))
    ended = runs.cli("train", config)
    assert ended.returncode == 1
    named = rf"{re.escape(file)}, row group 4, row [01]: corrupt \("
    assert re.search(named, ended.stderr)
    assert "or set corrupt_records=skip" in ended.stderr
    assert not list((tmp_path / "tiny" / "checkpoints").glob("[0-9]*"))

    ended = runs.cli("train", config, "corrupt_records=skip")
    assert ended.returncode == 0, ended.stderr
    # Eight documents are in a row group, and two values in a page.
    inspected = json.loads(runs.verb("inspect", tmp_path / "tiny", "--json"))
    skipped = inspected["steps"][-1]["data"]["skipped"]
    assert 0 < skipped <= 8 * 8
    assert f"corrupt records skipped: {skipped}" in runs.verb(
        "inspect", tmp_path / "tiny"
    )
    logged = ended.stderr
    assert re.search(named, logged)
    assert json.loads(runs.verb("audit", tmp_path / "tiny", "--json"))["passed"]


@pytest.mark.slow
def test_a_file_that_is_gone_is_named_and_the_saved_step_stays(trained):
    run = trained.parent / "tiny"
    before = files(run)
    hidden = trained.parent / "hidden"
    file = trained.parent / "a.parquet"
    file.rename(hidden)
    ended = runs.cli("train", trained, "steps=4")
    hidden.rename(file)
    assert ended.returncode == 1
    assert f"grain_train_files: {file} matches no file" in ended.stderr
    assert files(run) == before
    ended = runs.cli("train", trained, "steps=4")
    assert ended.returncode == 0, ended.stderr
    assert "from step 2 to step 4" in ended.stdout
