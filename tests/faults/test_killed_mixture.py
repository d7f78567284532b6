"""A packed mixture of Parquet files on real hosts: `kill -9`, fewer, then more."""

import json

import pytest

from tests import corpora, documents, runs
from tests.faults import test_killed_run

NUM_SHARDS = 12


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Settings of a packed mixture, which also name its compilation cache."""
    directory = tmp_path_factory.mktemp("mixture")
    for name, numbers in (("odd", range(1, 120, 2)), ("even", range(0, 80, 2))):
        texts = [f"text {number} ".encode() * (1 + number % 7) for number in numbers]
        corpora.write_parquet(
            directory / f"{name}.parquet", [{"text": text} for text in texts]
        )
    return str(directory / "odd.parquet"), {
        "grain_train_files": f"{directory}/odd.parquet,1;{directory}/even.parquet,3",
        "grain_file_type": "parquet",
        "num_logical_shards": NUM_SHARDS,
        "global_batch_size": NUM_SHARDS,
        "packing": True,
        "use_truncation": False,
        "max_target_length": 32,
    }


@pytest.mark.night
@pytest.mark.parametrize("workers", [1, 0])
def test_killed_on_four_hosts_it_goes_on_with_three_and_then_six(
    mixture, tmp_path, workers
):
    corpus, settings = mixture
    config = runs.write_config(tmp_path, corpus, **settings)
    run = tmp_path / "tiny"
    test_killed_run.kill_at("with_the_state_half_written", 3, config, hosts=4)
    assert runs.saved_steps(run) == [4]
    for hosts, steps, more in (
        (3, 8, []),
        # With other weights.
        (6, 12, [f"grain_train_files={swapped(settings)}"]),
    ):
        more.append(f"grain_worker_count={workers}")
        ended = runs.cli("train", config, f"hosts={hosts}", f"steps={steps}", *more)
        assert ended.returncode == 0, ended.stderr
        assert f"on {hosts} hosts" in ended.stdout
    outcome = json.loads(runs.verb("audit", run, "--json"))
    assert outcome["passed"]
    assert outcome["hosts"] == [4, 3, 6]
    assert outcome["num_examples"] == 12 * NUM_SHARDS
    # Not only the same rows, but each in its place.
    assert outcome["num_row_identical_steps"] == 12
    assert documents.assert_named(run, range(2, 12, 3), length=32) >= 4
    # Each batch has rows of all shards, and no two rows of the run are alike.
    records = runs.steps(run)
    assert [sorted(step.ids) for step in records] == [
        list(range(step * NUM_SHARDS, (step + 1) * NUM_SHARDS)) for step in range(12)
    ]
    assert len({step.digest for step in records}) == 12


def swapped(settings):
    first, second = settings["grain_train_files"].split(";")
    return f"{first[:-1]}3;{second[:-1]}1"


@pytest.mark.night
def test_evaluations_are_the_same_on_any_number_of_hosts(mixture, tmp_path):
    corpus, settings = mixture
    odd = settings["grain_train_files"].split(",")[0]
    settings = settings | {"grain_eval_files": odd, "eval_interval": 4}
    losses = {}
    for hosts in (1, 4):
        directory = tmp_path / str(hosts)
        directory.mkdir()
        config = runs.write_config(directory, corpus, **settings)
        ended = runs.cli("train", config, f"hosts={hosts}", "steps=4")
        assert ended.returncode == 0, ended.stderr
        (evaluated,) = runs.events(directory / "tiny", "evaluated")
        losses[hosts] = evaluated["loss"]
        assert evaluated["batches"] > 1
    # The same sums in another order.
    assert losses[1] == pytest.approx(losses[4], rel=1e-5)


@pytest.mark.night
def test_a_finite_run_ends_on_all_hosts_at_once_and_continues_to_no_step(
    mixture, tmp_path
):
    corpus, settings = mixture
    config = runs.write_config(
        tmp_path, corpus, **settings, num_epoch=1, steps=1000, checkpoint_period=100
    )
    ended = runs.cli("train", config, "hosts=3")
    assert ended.returncode == 0, ended.stderr
    (end,) = runs.events(tmp_path / "tiny", "data_ended")
    # Nothing was trained after the last real row, and the last step was saved.
    assert runs.saved_steps(tmp_path / "tiny") == [end["step"]]
    assert len(runs.steps(tmp_path / "tiny")) == end["step"] > 2
    again = runs.cli("train", config, "hosts=2")
    assert again.returncode == 0, again.stderr
    assert f"the data ended after step {end['step']}" in again.stdout
    assert len(runs.steps(tmp_path / "tiny")) == end["step"]
    assert json.loads(runs.verb("audit", tmp_path / "tiny", "--json"))["passed"]


@pytest.mark.night
def test_a_ramp_of_batch_sizes_takes_each_row_once(mixture, tmp_path):
    corpus, settings = mixture
    ramp = {
        "global_batch_size": 0,
        "per_device_batch_size": 12,
        "per_device_batch_size_start": 4,
        "per_device_batch_size_increment": 4,
        "global_rampup_samples": 48,
        "enable_rampup_batch_size": True,
    }
    config = runs.write_config(tmp_path, corpus, **settings | ramp)
    ended = runs.cli("train", config, "hosts=2", "steps=6")
    assert ended.returncode == 0, ended.stderr
    # Shards move between the hosts where batches grow from 16 to 24 rows. Then twice
    # the hosts: each stage has twice the rows.
    ended = runs.cli("train", config, "hosts=4", "steps=8")
    assert ended.returncode == 0, ended.stderr
    records = runs.steps(tmp_path / "tiny")
    assert [len(step.ids) for step in records] == [8, 8, 8, 16, 16, 24, 48, 48]
    used = sorted(id_ for step in records for id_ in step.ids)
    assert used == list(range(len(used)))
    assert json.loads(runs.verb("audit", tmp_path / "tiny", "--json"))["passed"]
