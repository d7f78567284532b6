"""Runs that begin with the weights of another checkpoint, of any format."""

import json
import pathlib

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.cli import main
from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.persistent import leases, persistent_root
from elastic_ckpt.universal import loading, shipped_layouts
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests import jobs
from tests.universal import safetensors_files

LAYOUT = """version: 1
rules:
  - from: {"model.embed_tokens.weight": "vocab embed"}
    to: {"params/embedding": "vocab embed"}
  - from:
      "model.layers.{layer}.q_proj.weight": "q embed"
      "model.layers.{layer}.k_proj.weight": "k embed"
      "model.layers.{layer}.v_proj.weight": "v embed"
    to: {"params/qkv": "layer embed (q + k + v)"}
  - from: {"model.layers.{layer}.o_proj.weight": "embed heads"}
    to: {"params/attention_out": "layer heads embed"}
  - from:
      "model.layers.{layer}.gate_proj.weight": "gate embed"
      "model.layers.{layer}.up_proj.weight": "up embed"
    to: {"params/mlp_in": "layer embed (gate + up)"}
  - from: {"model.layers.{layer}.down_proj.weight": "embed mlp"}
    to: {"params/mlp_out": "layer mlp embed"}
  - from: {"model.layers.{layer}.attention_norm.weight": "embed"}
    to: {"params/attention_norm": "layer embed"}
  - from: {"model.layers.{layer}.mlp_norm.weight": "embed"}
    to: {"params/mlp_norm": "layer embed"}
  - from: {"model.norm.weight": "embed"}
    to: {"params/final_norm": "embed"}
"""


def configured(directory, corpus, **settings):
    values = {"base_num_decoder_layers": 2, "steps": 2, **settings}
    return jobs.configured(directory, corpus, **values)


@pytest.fixture(scope="module")
def source(tmp_path_factory, corpus):
    """A step that a run of another seed saved, and its state in this memory."""
    directory = tmp_path_factory.mktemp("source")
    config = configured(directory, corpus, init_weights_seed=7)
    ended = jobs.trained(jobs.assembled(config))
    state = jax.tree.map(np.asarray, ended.state)
    return directory / "tiny" / "checkpoints" / "2", state


@pytest.fixture
def foreign(tmp_path, source):
    """The same weights as another program has them, as two keys."""
    _, state = source
    path, layout = tmp_path / "model.safetensors", tmp_path / "layout.yml"
    safetensors_files.write(path, as_other_program_has_it(state["params"]))
    layout.write_text(LAYOUT)
    return {"init_from": str(path), "init_from_layout": str(layout)}


def begun(config):
    return jobs.begun(jobs.assembled(config))


def assert_params(state, params):
    for name, leaf in params.items():
        assert np.asarray(state["params"][name]).tobytes() == leaf.tobytes()


def as_other_program_has_it(params):
    """The weights in the names and layouts of a LLaMA for PyTorch."""
    tensors = {
        "model.embed_tokens.weight": params["embedding"],
        "model.norm.weight": params["final_norm"],
    }
    for layer in range(len(params["qkv"])):
        parts = {
            **dict(zip("qkv", np.split(params["qkv"][layer].T, 3), strict=True)),
            "o": params["attention_out"][layer].T,
            **dict(
                zip(("gate", "up"), np.split(params["mlp_in"][layer].T, 2), strict=True)
            ),
            "down": params["mlp_out"][layer].T,
        }
        start = f"model.layers.{layer}."
        for name, values in parts.items():
            tensors[f"{start}{name}_proj.weight"] = np.ascontiguousarray(values)
        for name in ("attention", "mlp"):
            tensors[f"{start}{name}_norm.weight"] = params[f"{name}_norm"][layer]
    return tensors


def losses(directory, corpus, **settings):
    jobs.trained(jobs.assembled(configured(directory, corpus, **settings)))
    return jobs.losses(directory)


@pytest.mark.slow
def test_losses_from_safetensors_are_those_from_the_state_that_orbax_saved(
    tmp_path, corpus, source, foreign
):
    _, state = source
    plain = tmp_path / "plain" / "2"
    ocp.save_checkpointables(plain, {"state": state})
    of_orbax = losses(tmp_path / "of_orbax", corpus, init_from=str(plain))
    of_safetensors = losses(tmp_path / "of_safetensors", corpus, **foreign)
    assert of_safetensors == of_orbax


def test_the_weights_of_a_run_come_back_by_the_layout_that_it_began_with(
    tmp_path, source, foreign
):
    step, state = source
    params = state["params"]
    config = tmp_path / "config.json"
    sizes = {
        "heads": params["qkv"].shape[2] // 3,
        "mlp": params["mlp_in"].shape[2] // 2,
    }
    config.write_text(json.dumps(sizes))
    layout = pathlib.Path(foreign["init_from_layout"])
    heads, mlp = "{value: config/heads}", "{value: config/mlp}"
    given = f"sizes: {{q: {heads}, k: {heads}, v: {heads}, gate: {mlp}, up: {mlp}}}\n"
    layout.write_text(LAYOUT + given)
    made = tmp_path / "made"
    options = ["--rules", layout, "--reverse", "--weights", "--config", tmp_path]
    given = ["convert", step, made, "--to", "hf", *options]
    assert main.main([*map(str, given)]) == 0
    expected = safetensors_files.bits(as_other_program_has_it(params))
    assert safetensors_files.bits(safetensors_files.read(made)) == expected


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_a_step_of_ours_and_nothing_else(
    tmp_path, corpus, source, monkeypatch
):
    step, saved = source
    root = persistent_root.PersistentRoot.from_path(step.parent)
    leased = []
    read = loading.load

    def load_leased(*arguments, **options):
        leased.append(leases.Watch().leased(root))
        return read(*arguments, **options)

    monkeypatch.setattr(loading, "load", load_leased)
    state = begun(configured(tmp_path, corpus, init_from=str(step)))
    # Its run does not remove it meanwhile.
    assert (leased, leases.Watch().leased(root)) == ([{2}], set())
    assert_params(state, saved["params"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state["opt_state"]))
    assert int(state["step"]) == 0


@pytest.mark.slow
def test_weights_come_from_a_bucket(bucket, tmp_path, corpus, source, foreign):
    _, saved = source
    path = f"{bucket}/llama"
    safetensors_files.write(
        storage.absolute(f"{path}/model.safetensors"),
        as_other_program_has_it(saved["params"]),
    )
    keys = {**foreign, "init_from": path}
    state = begun(configured(tmp_path / "run", corpus, **keys))
    assert_params(state, saved["params"])
    assert len(state["params"]["qkv"].sharding.device_set) == 4


@pytest.mark.slow
def test_a_run_that_has_saved_a_step_does_not_read_the_weights_again(
    tmp_path, corpus, source, foreign
):
    _, saved = source
    emitted = []

    def emit(name, **fields):
        emitted.append((name, fields))

    for steps in (1, 2):
        config = configured(tmp_path / "run", corpus, steps=steps, **foreign)
        jobs.trained(jobs.assembled(config, emit=emit))
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
    loaded, skipped = [each for each in emitted if each[0].startswith("weights")]
    path = foreign["init_from"]
    num_bytes = sum(leaf.nbytes for leaf in saved["params"].values())
    assert loaded[0] == "weights_loaded"
    assert (loaded[1]["path"], loaded[1]["bytes"]) == (path, num_bytes)
    assert skipped == ("weights_skipped", {"path": path, "step": 1})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ('    to: {"params/embed": "vocab embed"}', r"line 3: rules\[0\]"),
        ('    onto: {"params/embedding": "vocab embed"}', "line 4: .*unknown key"),
        ('    to: {"params/embedding": "vocab"}', r"line 3: rules\[0\]"),
    ],
)
def test_an_error_in_a_layout_names_its_file_and_line(
    tmp_path, corpus, foreign, changed, message
):
    lines = LAYOUT.splitlines()
    lines[3] = changed
    layout = tmp_path / "layout.yml"
    layout.write_text("\n".join(lines))
    with pytest.raises(LayoutError, match=message) as raised:
        begun(configured(tmp_path / "run", corpus, **foreign))
    assert str(layout) in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base_num_decoder_layers": 3}, "another model.*params/attention_norm"),
        ({"init_from": "/elsewhere"}, "does not exist"),
    ],
)
def test_a_checkpoint_of_another_model_needs_a_layout(
    tmp_path, corpus, source, changed, message
):
    step, _ = source
    settings = {"init_from": str(step), **changed}
    with pytest.raises(errors.ElasticCkptError, match=message):
        begun(configured(tmp_path, corpus, **settings))


@pytest.mark.slow
def test_an_error_names_the_weights_that_a_step_lacks(tmp_path, corpus, source):
    _, state = source
    params = {k: v for k, v in state["params"].items() if k != "mlp_norm"}
    step = tmp_path / "2"
    ocp.save_checkpointables(step, {"state": {**state, "params": params}})
    with pytest.raises(errors.CheckpointError, match="params/mlp_norm"):
        begun(configured(tmp_path / "run", corpus, init_from=str(step)))


@pytest.mark.slow
def test_a_checkpoint_without_a_layout_is_refused_with_those_that_fit(
    tmp_path, corpus, foreign, monkeypatch
):
    monkeypatch.setattr(shipped_layouts, "shipped", lambda: ["llama_to_demo"])
    monkeypatch.setattr(shipped_layouts, "load", lambda _: Layout.parse(LAYOUT))
    keys = {**foreign, "init_from_layout": ""}
    with pytest.raises(errors.OtherModelError, match=r"fit its names: llama_to_demo\)"):
        begun(configured(tmp_path / "run", corpus, **keys))
    keys["init_from_layout"] = "llama_to_demo"
    assert int(begun(configured(tmp_path / "named", corpus, **keys))["step"]) == 0
