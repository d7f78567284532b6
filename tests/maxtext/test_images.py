"""Text and images in the MaxText of PyPI: its own rows, on any number of hosts."""

import json
import os
import subprocess

import pytest

from elastic_ckpt.cli import main as cli
from tests import runs, shared_memory
from tests.maxtext import environment, images

pytestmark = pytest.mark.slow

STEPS, ROWS = 10, 2
EVAL_INTERVAL = 4
TEXT = [
    "inputs",
    "inputs_position",
    "inputs_segmentation",
    "targets",
    "targets_position",
    "targets_segmentation",
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The directory of the files, with what `images` has found there."""
    environment.set_up()
    directory = tmp_path_factory.mktemp("images")
    environment.run("tests.maxtext.images", str(directory))
    return directory


def parts(found, *names):
    """Of each feature, the shape of its part on a device, where all rows are equal."""
    assert found.keys() == {*TEXT, *names}
    for name, (is_equal, _) in found.items():
        assert is_equal, name
    return {name: shapes for name, (_, shapes) in found.items()}


@pytest.mark.night
def test_rows_are_those_of_maxtext_s_own_pipeline(compared):
    found = json.loads((compared / "compared.json").read_text())
    rows = images.ROWS // images.DEVICES
    for column, num_images in images.COLUMNS.items():
        gemma = parts(found.pop(f"gemma3-4b {column}"), "images")
        assert gemma["images"] == [[rows, num_images, 896, 896, 3]]
    qwen = parts(found.pop("qwen3-vl-2b image"), "images")
    assert qwen["images"] == [[rows, 3, 2, 768, 768]]
    length = images.MODELS["qwen3-vl-2b"]["max_target_length"]
    assert qwen["inputs_position"] == [[rows, length, 3]]
    llama = parts(found.pop("llama4-17b-16e image"), "images", "image_masks")
    assert llama["images"][0][:2] == [rows, 20]
    assert llama["image_masks"] == [[rows, 1, 20]]
    assert found.keys() == {"array_record", "worker", "evaluation"}
    for of_case in found.values():
        parts(of_case, "images", "image_masks")


class Runs:
    """Runs of a small model on the files, and what is left of them."""

    def __init__(self, hosts, files, directory):
        self._hosts, self._files, self._directory = hosts, files, directory

    def run(
        self,
        name,
        *,
        steps,
        num_hosts,
        model="gemma3-4b",
        column="image",
        program="ours",
        code=0,
        **settings,
    ):
        """A run to a number of steps; the directory of its logs and batches."""
        keys = {
            **images.SETTINGS,
            **images.settings(model),
            **images.SMALL[model],
            "num_logical_shards": 4,
            "train_image_column": column,
            "max_num_images_per_example": images.COLUMNS[column],
            "grain_train_files": self._files / "train.parquet",
            "grain_eval_files": self._files / "held_out.parquet",
            "checkpoint_period": 2,
            "async_checkpointing": False,
            "learning_rate_schedule_steps": STEPS,
            "per_device_batch_size": ROWS // num_hosts,
            "run_name": name,
            "base_output_directory": self._directory / "runs",
            "jax_cache_dir": self._directory / "jax_cache",
            "steps": steps,
            **settings,
        }
        logs = self._directory / "logs" / f"{name}-{steps}"
        codes = self._hosts.run(
            num_hosts=1 if program == "elastic" else num_hosts,
            directory=logs,
            program=program,
            arguments=[f"{key}={value}" for key, value in keys.items()],
        )
        assert set(codes) == {code}, (logs / "0.log").read_text()[-5000:]
        return logs

    def directory(self, name):
        return self._directory / "runs" / name


@pytest.fixture(scope="module")
def maxtext(compared, tmp_path_factory):
    hosts = environment.Hosts(tmp_path_factory.mktemp("server"))
    yield Runs(hosts, compared, tmp_path_factory.mktemp("maxtext"))
    hosts.close()


@pytest.fixture(scope="module")
def whole(maxtext):
    """The run that is not interrupted, on one host."""
    return maxtext.run(
        "whole", steps=STEPS, num_hosts=1, eval_interval=EVAL_INTERVAL, eval_steps=-1
    )


def audit(directory):
    """Audits a run in MaxText's environment, which makes its rows again."""
    ended = subprocess.run(
        [environment.ENVIRONMENT / "bin/elastic-ckpt", "audit", directory, "--json"],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-5000:]
    return json.loads(ended.stdout[ended.stdout.index("{") :])


@pytest.mark.night
def test_a_run_that_goes_on_on_two_hosts_is_that_of_one(maxtext, whole, capsys):
    expected, losses = environment.batches(whole), environment.losses(whole)
    assert len(expected["train"]) == STEPS
    assert len({loss for _, loss, _ in losses["train"].values()}) > STEPS // 2
    evaluation = {"eval_interval": EVAL_INTERVAL, "eval_steps": -1}
    begin = 0
    for steps, num_hosts in ((5, 1), (9, 2)):
        logs = maxtext.run("continued", steps=steps, num_hosts=num_hosts, **evaluation)
        seen = environment.batches(logs)
        assert seen["train"] == expected["train"][begin:steps]
        # Three records for evaluation are two batches, the last one padded.
        evaluated = [step for step in range(begin, steps) if step % EVAL_INTERVAL == 0]
        assert seen["eval"] == expected["eval"][:2] * len(evaluated)
        printed = environment.losses(logs)
        assert printed["train"] == {s: losses["train"][s] for s in range(begin, steps)}
        assert printed["eval"] == {s: losses["eval"][s] for s in evaluated}
        begin = steps
    directory = maxtext.directory("continued")
    audited = audit(directory)
    assert audited["passed"]
    assert audited["hosts"] == [1, 2]
    assert audited["num_row_identical_steps"] == audited["num_steps"] == steps
    # Without MaxText no row can be made.
    assert cli.main(["audit", str(directory)]) == 1
    assert "MaxText is not installed beside elastic_ckpt" in capsys.readouterr().err

    refused = maxtext.run("continued", steps=STEPS, num_hosts=1, code=1, column="pair")
    assert "train_image_column: saved " in (refused / "0.log").read_text()


@pytest.mark.night
def test_a_live_run_loses_a_slice(maxtext, whole):
    with shared_memory.directory("maxtext") as ram:
        logs = maxtext.run(
            "live",
            steps=STEPS,
            num_hosts=2,
            program="elastic",
            hosts=2,
            slices=2,
            elastic_enabled=True,
            elastic_min_slice_count=1,
            elastic_settle_seconds=0,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=2,
            local_checkpoint_size_limit="512Mi",
            multi_tier_checkpointing_backup_interval_steps=20,
            faults="[{kill_slice: 1, at_step: 3}]",
        )
    directory = maxtext.directory("live")
    started = runs.events(directory, "run_started")
    assert [event["hosts"] for event in started] == [2, 1]
    expected = environment.batches(whole)["train"]
    worlds = environment.worlds(logs)
    assert [begin for begin, _ in worlds] == [event["start_step"] for event in started]
    for begin, seen in worlds:
        assert seen
        # On one slice gradients accumulate: it gets the rows of both.
        assert seen == expected[begin : begin + len(seen)]
    assert begin + len(seen) == STEPS
    assert audit(directory)["passed"]


@pytest.mark.night
def test_a_model_with_three_positions_is_trained_alike_on_two_hosts(maxtext):
    keys = {"steps": 2, "model": "qwen3-vl-2b"}
    whole = maxtext.run("positions", num_hosts=1, **keys)
    of_two = maxtext.run("positions-2", num_hosts=2, **keys)
    assert environment.batches(of_two) == environment.batches(whole)
    losses = environment.losses(whole)
    assert sorted(losses["train"]) == [0, 1]
    assert environment.losses(of_two) == losses
