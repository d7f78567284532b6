"""Runs that begin with the weights of another checkpoint, of any format."""

import jax
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.persistent import leases, persistent_root
from elastic_ckpt.universal import loading
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


def begun(config, **options):
    return jobs.begun(jobs.assembled(config, **options))


@pytest.fixture(scope="module")
def params(tmp_path_factory, corpus):
    """Weights of the model, whatever they are."""
    directory = tmp_path_factory.mktemp("abstract")
    job = jobs.assembled(configured(directory, corpus, enable_checkpointing=False))
    job.close()
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(leaf.shape).astype(leaf.dtype)
        for name, leaf in job.loop.program.abstract_state["params"].items()
    }


@pytest.fixture
def foreign(tmp_path, params):
    """The same weights as another program has them, as two keys."""
    path, layout = tmp_path / "model.safetensors", tmp_path / "layout.yml"
    safetensors_files.write(path, as_other_program_has_it(params))
    layout.write_text(LAYOUT)
    return {"init_from": str(path), "init_from_layout": str(layout)}


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


def check_begun(state, params):
    """The weights are these, and all else is new."""
    for name, leaf in params.items():
        assert np.asarray(state["params"][name]).tobytes() == leaf.tobytes()
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state["opt_state"]))
    assert int(state["step"]) == 0


def test_run_begins_with_the_weights_of_another_program_and_nothing_else(
    tmp_path, corpus, params, foreign
):
    told = []
    state = begun(
        configured(tmp_path / "run", corpus, **foreign),
        emit=lambda name, **fields: told.append((name, fields)),
    )
    check_begun(state, params)
    assert len(state["params"]["qkv"].sharding.device_set) == 4
    (fields,) = [fields for name, fields in told if name == "weights_loaded"]
    assert fields["path"] == foreign["init_from"]
    assert fields["bytes"] == sum(leaf.nbytes for leaf in params.values())


@pytest.mark.slow
def test_run_begins_with_a_step_of_ours_and_reads_it_once(
    tmp_path, corpus, monkeypatch
):
    config = configured(tmp_path / "source", corpus, init_weights_seed=7)
    saved = jax.tree.map(np.asarray, jobs.trained(jobs.assembled(config)).state)
    step = tmp_path / "source" / "tiny" / "checkpoints" / "2"
    root = persistent_root.PersistentRoot.from_path(step.parent)
    leased = []
    read = loading.load

    def load_leased(*arguments, **options):
        leased.append(leases.Watch().leased(root))
        return read(*arguments, **options)

    monkeypatch.setattr(loading, "load", load_leased)
    keys = {"init_from": str(step), "steps": 1}
    check_begun(begun(configured(tmp_path / "begun", corpus, **keys)), saved["params"])
    # Its run does not remove it meanwhile.
    assert (leased, leases.Watch().leased(root)) == ([{2}], set())
    jobs.trained(jobs.assembled(configured(tmp_path / "run", corpus, **keys)))
    told = []

    def emit(name, **fields):
        told.append((name, fields))

    keys = {"init_from": "/gone", "steps": 2}
    jobs.trained(
        jobs.assembled(configured(tmp_path / "run", corpus, **keys), emit=emit)
    )
    assert ("weights_skipped", {"path": "/gone", "step": 1}) in told
    keys = {"init_from": str(step), "base_num_decoder_layers": 3}
    with pytest.raises(errors.ElasticCkptError, match=r"another model.*params/att"):
        begun(configured(tmp_path / "other", corpus, **keys))


def test_error_in_a_layout_names_its_file_and_line(tmp_path, corpus, foreign):
    layout = tmp_path / "layout.yml"
    layout.write_text(LAYOUT.replace("params/embedding", "params/embed"))
    with pytest.raises(LayoutError, match=rf"{layout}.*line 3: rules\[0\]"):
        begun(configured(tmp_path / "run", corpus, **foreign))
