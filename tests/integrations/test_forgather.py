"""Checkpoints of Forgather are read: manifest, patterns, every component.

tests/golden/forgather/make.py wrote the files, with torch.
"""

import pathlib
import shutil
import sys
import types

import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.integrations import forgather
from elastic_ckpt.universal.formats.files import FormatError
from tests.checkpoint.components import test_component
from tests.checkpoint.components.test_encoding import same
from tests.universal.formats.stored_values import read

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "forgather"
VALUES = np.load(GOLDEN / "values.npz")
HYBRID = "pipeline-2x2"


def check_optimizer(prefix, state):
    for number, moments in state["state"].items():
        assert sorted(moments) == ["exp_avg", "exp_avg_sq", "step"]
        for name, array in moments.items():
            expected = VALUES[f"{prefix}/{number}/{name}"]
            assert array.tobytes() == expected.tobytes(), (number, name)
    (group,) = state["param_groups"]
    assert (group["lr"], group["betas"]) == (0.01, (0.9, 0.999))


def test_patterns_and_states_of_a_hybrid_trainer():
    checkpoint = forgather.Checkpoint.open(GOLDEN / HYBRID)
    assert {key: c.pattern for key, c in checkpoint.components.items()} == {
        "optimizer": "per_group",
        "scheduler": "replicated",
        "trainer": "global",
        "dataset": "global",
        "rng": "per_rank",
        "cache": "per_node",
    }
    by_leader = checkpoint.states("optimizer")
    assert list(by_leader) == [0, 1]
    for leader, state in by_leader.items():
        check_optimizer(f"optimizer{leader}", state)
    for rank, state in checkpoint.states("rng").items():
        assert state["torch_rng_state"].tobytes() == VALUES[f"rng{rank}"].tobytes()
        assert state["initial_seed"] == 2**63 + 11
    assert [int(each["hits"]) for each in checkpoint.states("cache").values()] == [5, 6]
    assert checkpoint.state("trainer") == {"global_step": 7, "epoch": 0.5}
    assert checkpoint.state("scheduler")["_last_lr"] == [0.0075]
    assert checkpoint.state("dataset")["_dataset"] == {"shards": [1, 2], "name": "web"}
    assert "torch" not in sys.modules


@pytest.mark.parametrize(("trainer", "prefix"), [(HYBRID, ""), ("single", "single/")])
def test_weights_of_all_stages_are_read_by_universal(trainer, prefix):
    tensors = ec.universal.open_checkpoint(GOLDEN / trainer).tensors
    assert len(tensors) == 2
    for tensor in tensors:
        expected = VALUES[f"{prefix}{tensor.name}"]
        assert read(tensor).tobytes() == expected.tobytes()


class Scheduler:
    def load_state_dict(self, state):
        self.state = state

    def state_dict(self):
        return self.state


def dealt(old_states, new_count):
    """A rule: the old states in turn."""
    return [old_states[number % len(old_states)] for number in range(new_count)]


def loaded(turns, num_hosts, **changed):
    """The states of each host's components, two hosts on a node.

    They have the patterns of the hybrid trainer, but for those that are `changed`.
    """
    checkpoint = forgather.Checkpoint.open(GOLDEN / HYBRID)

    def load(_):
        made = {
            "trainer": ec.components.Component({}, "global"),
            "dataset": ec.components.Component({}, "global"),
            "scheduler": ec.components.Component(Scheduler(), "replicated"),
            "rng": ec.components.Component({}, "per_host"),
            "cache": ec.components.Component({}, "per_node", processes_per_node=2),
        } | changed
        assert checkpoint.load_into(made) == list(made)
        return {key: component.get() for key, component in made.items()}

    return turns.run(num_hosts, load)


def ranks(hosts):
    """The rank whose random state each host has."""
    saved = [VALUES[f"rng{rank}"].tobytes() for rank in range(4)]
    return [saved.index(host["rng"]["torch_rng_state"].tobytes()) for host in hosts]


@pytest.fixture
def turns(monkeypatch):
    return test_component.Turns(monkeypatch)


def test_on_other_hosts_the_rules_of_components_decide(turns, tmp_path):
    with pytest.raises(errors.CheckpointError, match="choose on_resize"):
        loaded(turns, 3)
    rules = {
        "rng": ec.components.Component({}, "per_host", on_resize=dealt),
        "cache": ec.components.Component(
            {}, "per_node", processes_per_node=2, on_resize="reset"
        ),
    }
    hosts = loaded(turns, 6, **rules)
    assert ranks(hosts) == [0, 1, 2, 3, 0, 1]
    assert all(host["cache"] == {} for host in hosts)
    rules["rng"] = ec.components.Component({}, "global", on_resize="from_first")
    (host,) = loaded(turns, 1, **rules)
    assert ranks([host]) == [0]
    # They are components like others from then on.
    for key, value in host.items():
        directory = tmp_path / key
        directory.mkdir()
        again = ec.components.Component({}, "global")
        test_component.save(ec.components.Component(value, "global"), directory)
        test_component.load(again, directory)
        same(again.get(), value)


def test_states_of_groups_lie_in_the_order_of_a_mesh(turns):
    devices = [types.SimpleNamespace(process_index=host) for host in range(4)]
    mesh = types.SimpleNamespace(
        axis_names=("stage", "dp"), devices=np.array(devices).reshape(2, 2)
    )
    checkpoint = forgather.Checkpoint.open(GOLDEN / HYBRID)

    def load(_):
        component = ec.components.Component({}, "per_group", axis="stage", mesh=mesh)
        checkpoint.load_into({"optimizer": component})
        return component.get()

    for host, state in enumerate(turns.run(4, load)):
        check_optimizer(f"optimizer{host % 2}", state)


def test_components_are_all_set_or_none():
    checkpoint = forgather.Checkpoint.open(GOLDEN / "single")
    check_optimizer("single", checkpoint.state("optimizer"))
    made = {
        "trainer": ec.components.Component(1, "global"),
        "scheduler": ec.components.Component(2, "global"),
    }
    with pytest.raises(FormatError, match="no component 'scheduler'"):
        checkpoint.load_into(made)
    assert made["trainer"].state == 1
    made["scheduler"] = ec.components.Component(2, "global", required=False)
    assert checkpoint.load_into(made) == ["trainer"]
    assert made["scheduler"].state == 2
    assert made["trainer"].state["global_step"]


@pytest.mark.parametrize(
    "manifest",
    [
        None,
        "{",
        "[]",
        "{}",
        '{"world_size": 4, "components": {"rng": {"sharing_pattern": "x"}}}',
    ],
)
def test_files_that_are_missing_or_spoilt_are_named(tmp_path, manifest):
    copied = shutil.copytree(GOLDEN / HYBRID, tmp_path / HYBRID)
    (copied / "rng_state_rank_2.pt").unlink()
    with pytest.raises(FormatError, match=r"rng \(per_rank\).*ranks 2 are missing"):
        forgather.Checkpoint.open(copied)
    (copied / forgather.MANIFEST).unlink()
    if manifest:
        (copied / forgather.MANIFEST).write_text(manifest)
    with pytest.raises(FormatError, match=forgather.MANIFEST):
        forgather.Checkpoint.open(copied)
