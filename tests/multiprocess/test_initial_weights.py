"""Runs of two hosts that begin with another checkpoint."""

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from tests import runs
from tests.application import foreign_states
from tests.application import test_initial_weights as one_host
from tests.universal import safetensors_files
from tests.universal.formats import llama_values as llama


@pytest.mark.thorough
@pytest.mark.slow(minutes=1)
def test_on_two_hosts_losses_from_safetensors_are_those_from_orbax(tmp_path, corpus):
    seeded = one_host.configured(tmp_path, corpus, init_weights_seed=7)
    state = jax.tree.map(np.asarray, one_host.begun(seeded))
    ocp.save_checkpointables(tmp_path / "plain" / "2", {"state": state})
    path, layout = tmp_path / "model.safetensors", tmp_path / "layout.yml"
    safetensors_files.write(path, one_host.as_other_program_has_it(state["params"]))
    layout.write_text(one_host.LAYOUT)
    losses = {}
    for name, keys in (
        ("plain", [f"init_from={tmp_path / 'plain' / '2'}"]),
        ("rules", [f"init_from={path}", f"init_from_layout={layout}"]),
    ):
        config = runs.write_config(tmp_path, corpus, run_name=name, steps=3)
        ended = runs.cli("train", config, "hosts=2", "base_num_decoder_layers=2", *keys)
        assert ended.returncode == 0, ended.stderr
        (loaded,) = runs.events(tmp_path / name, "weights_loaded")
        assert loaded["bytes"] == sum(leaf.nbytes for leaf in state["params"].values())
        losses[name] = [record.loss for record in runs.steps(tmp_path / name)]
    assert losses["rules"] == losses["plain"]
    # Another start goes on from a step of the run.
    path.unlink()
    ended = runs.cli(
        "train", config, "hosts=2", "base_num_decoder_layers=2", "steps=4", *keys
    )
    assert ended.returncode == 0, ended.stderr
    assert "init_from is not read: the run has saved step 3" in ended.stdout


@pytest.mark.thorough
@pytest.mark.slow(minutes=1)
def test_runs_of_two_hosts_go_on_from_deepspeed_and_pass_the_audit(tmp_path, corpus):
    source = foreign_states.SOURCES["DeepSpeed ZeRO-3"]
    path, layout = source.write(tmp_path), tmp_path / "layout.yml"
    layout.write_text(source.layout)
    keys = [
        f"init_from={path}",
        f"init_from_layout={layout}",
        "init_from_optimizer=true",
    ]
    losses = {}
    for name, hosts in (("two_hosts", 2), ("one_host", 1)):
        config = runs.write_config(
            tmp_path, corpus, run_name=name, steps=6, checkpoint_period=4, **llama.SIZES
        )
        ended = runs.cli("train", config, f"hosts={hosts}", *keys)
        assert ended.returncode == 0, ended.stderr
        assert f"the run goes on from its step {llama.STEPS}" in ended.stdout
        (loaded,) = runs.events(tmp_path / name, "weights_loaded")
        assert loaded["step"] == llama.STEPS
        assert runs.saved_steps(tmp_path / name) == [4, 6]
        # The next start goes on from its own step.
        ended = runs.cli("train", config, f"hosts={hosts}", "steps=8", *keys)
        assert ended.returncode == 0, ended.stderr
        assert "the run has saved step 6" in ended.stdout
        steps = runs.steps(tmp_path / name)
        assert [each.step for each in steps] == list(range(llama.STEPS, 8))
        assert "6 steps took 48 rows" in runs.verb("audit", tmp_path / name)
        losses[name] = [each.loss for each in steps]
    # The same float32 sums in another order, over other devices.
    np.testing.assert_allclose(losses["two_hosts"], losses["one_host"], rtol=1e-3)
