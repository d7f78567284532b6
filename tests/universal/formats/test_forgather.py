"""Checkpoints of Forgather are read: manifest, patterns, weights, every component.

tests/golden/forgather/make.py wrote the files, with torch.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import pytest

from elastic_ckpt.universal.formats import forgather
from elastic_ckpt.universal.formats.forgather import Pattern
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import torch_files

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "forgather"
VALUES = np.load(GOLDEN / "values.npz")
HYBRID = "pipeline-2x2"


@pytest.fixture
def copied(tmp_path):
    return pathlib.Path(shutil.copytree(GOLDEN / HYBRID, tmp_path / HYBRID))


def check_optimizer(prefix, state):
    for number, moments in state["state"].items():
        assert sorted(moments) == ["exp_avg", "exp_avg_sq", "step"]
        for name, array in moments.items():
            expected = VALUES[f"{prefix}/{number}/{name}"]
            assert array.tobytes() == expected.tobytes(), (number, name)
    (group,) = state["param_groups"]
    assert (group["lr"], group["betas"]) == (0.01, (0.9, 0.999))


def check_rng(name, state):
    assert state["torch_rng_state"].tobytes() == VALUES[name].tobytes()
    assert state["initial_seed"] == 2**63 + 11


def test_patterns_and_states_of_a_hybrid_trainer():
    checkpoint = forgather.Checkpoint.open(GOLDEN / HYBRID)
    assert checkpoint.world_size == 4
    assert {key: c.pattern for key, c in checkpoint.components.items()} == {
        "optimizer": Pattern.PER_GROUP,
        "scheduler": Pattern.REPLICATED,
        "trainer": Pattern.GLOBAL,
        "dataset": Pattern.GLOBAL,
        "rng": Pattern.PER_RANK,
        "cache": Pattern.PER_NODE,
    }
    assert checkpoint.components["optimizer"].group == "dp_group"
    by_leader = checkpoint.states("optimizer")
    assert list(by_leader) == [0, 1]
    for leader, state in by_leader.items():
        check_optimizer(f"optimizer{leader}", state)
    for rank, state in checkpoint.states("rng").items():
        check_rng(f"rng{rank}", state)
    assert [int(each["hits"]) for each in checkpoint.states("cache").values()] == [5, 6]
    assert checkpoint.state("trainer") == {"global_step": 7, "epoch": 0.5}
    assert checkpoint.state("scheduler")["_last_lr"] == [0.0075]
    assert checkpoint.state("dataset")["_dataset"] == {"shards": [1, 2], "name": "web"}
    metadata = checkpoint.metadata()
    assert metadata["best_checkpoints"] == [("/output/checkpoint-5", 2.25)]
    assert metadata["callback_states"]["callback_0_DualTimeScale"]["best"] == 2.25
    assert "torch" not in sys.modules


def test_weights_of_all_stages_are_joined():
    weights = forgather.Checkpoint.open(GOLDEN / HYBRID).weights()
    assert sorted(weights) == ["layers.0.weight", "layers.1.weight"]
    for name, array in weights.items():
        assert array.tobytes() == VALUES[name].tobytes()


def test_a_single_trainer_with_safetensors():
    checkpoint = forgather.Checkpoint.open(GOLDEN / "single")
    weights = checkpoint.weights()
    assert weights["head.weight"].tobytes() == VALUES["single/head.weight"].tobytes()
    check_optimizer("single", checkpoint.state("optimizer"))
    assert checkpoint.metadata() == {}


def test_a_checkpoint_before_manifests():
    checkpoint = forgather.Checkpoint.open(GOLDEN / "without_manifest")
    assert checkpoint.world_size is None
    assert checkpoint.components["rng"].pattern is Pattern.PER_RANK
    assert list(checkpoint.states("rng")) == [0, 1]
    assert checkpoint.state("scheduler") == {"last_epoch": 2}
    assert checkpoint.weights()["w"].tobytes() == VALUES["older/w"].tobytes()


def test_one_state_is_not_made_of_several(copied):
    checkpoint = forgather.Checkpoint.open(copied)
    with pytest.raises(FormatError, match=r"rng is PER_RANK, one for each of \[0, 1"):
        checkpoint.state("rng")
    with pytest.raises(FormatError, match="no component 'model'; it has"):
        checkpoint.state("model")


def test_missing_files_are_named(copied):
    (copied / "rng_state_rank_2.pt").unlink()
    with pytest.raises(FormatError, match=r"rng \(PER_RANK\).*files of 2 are missing"):
        forgather.Checkpoint.open(copied)
    (copied / "pytorch_model-00002-of-00002.bin").unlink()
    (copied / forgather.MANIFEST).unlink()
    checkpoint = forgather.Checkpoint.open(copied)
    with pytest.raises(FormatError, match="-00002-of-00002"):
        checkpoint.weights()
    with pytest.raises(FormatError, match="no file of a checkpoint of Forgather"):
        forgather.Checkpoint.open(GOLDEN.parent)


def test_a_file_of_another_world_that_was_left_is_not_read(copied):
    shutil.copy(copied / "rng_state_rank_1.pt", copied / "rng_state_rank_9.pt")
    assert list(forgather.Checkpoint.open(copied).states("rng")) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "manifest",
    [
        "{",
        "[]",
        "{}",
        '{"world_size": 4}',
        '{"world_size": 4, "components": []}',
        '{"world_size": 4, "components": {"rng": {}}}',
        '{"world_size": 4, "components": {"rng": {"sharing_pattern": "x"}}}',
    ],
)
def test_a_manifest_that_is_none_is_refused(copied, manifest):
    (copied / forgather.MANIFEST).write_text(manifest)
    with pytest.raises(FormatError, match=forgather.MANIFEST):
        forgather.Checkpoint.open(copied)


@pytest.mark.parametrize("file", ["../x.bin", "/etc/passwd", "a/b.bin", ".hidden", 3])
def test_a_shard_outside_of_the_checkpoint_is_refused(copied, file):
    index = copied / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(FormatError, match="outside of it"):
        forgather.Checkpoint.open(copied).weights()


def test_code_in_a_state_is_named_with_its_file(copied):
    value = torch_files.Named("os", "system", "true")
    torch_files.write(copied / "scheduler_state.pt", value)
    checkpoint = forgather.Checkpoint.open(copied)
    with pytest.raises(FormatError, match=r"scheduler_state.pt names os\.system"):
        checkpoint.state("scheduler")
