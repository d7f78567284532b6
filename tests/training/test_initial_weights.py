"""Runs that begin with the weights of another checkpoint, of any format."""

import jax
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.persistent import leases, persistent_root
from elastic_ckpt.universal import loading
from elastic_ckpt.universal.rules.layout import LayoutError
from tests import jobs
from tests.recorded_events import RecordedEvents
from tests.universal import safetensors_files


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
    jobs.begun(job)
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(leaf.shape).astype(leaf.dtype)
        for name, leaf in job.program.abstract_state["params"].items()
    }


@pytest.fixture
def foreign(tmp_path, params):
    """The same weights as another program names them, as two keys."""
    path, layout = tmp_path / "model.safetensors", tmp_path / "layout.yml"
    safetensors_files.write(path, {f"model.{n}": leaf for n, leaf in params.items()})
    lines = ["version: 1", "rules:"]
    for name, leaf in params.items():
        dims = "a b c"[: 2 * leaf.ndim - 1]
        lines += [f'  - from: {{"model.{name}": "{dims}"}}']
        lines += [f'    to: {{"params/{name}": "{dims}"}}']
    layout.write_text("\n".join(lines))
    return {"init_from": str(path), "init_from_layout": str(layout)}


def check_begun(state, params):
    """The weights are these, and all else is new."""
    for name, leaf in params.items():
        assert np.asarray(state["params"][name]).tobytes() == leaf.tobytes()
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state["opt_state"]))
    assert int(state["step"]) == 0


def test_run_begins_with_the_weights_of_another_program_and_nothing_else(
    tmp_path, corpus, params, foreign
):
    recorded = RecordedEvents()
    state = begun(configured(tmp_path / "run", corpus, **foreign), emit=recorded)
    check_begun(state, params)
    assert len(state["params"]["qkv"].sharding.device_set) == 4
    (fields,) = recorded.named("weights_loaded")
    assert fields["path"] == foreign["init_from"]
    assert fields["bytes"] == sum(leaf.nbytes for leaf in params.values())
    layout = tmp_path / "layout.yml"
    layout.write_text(layout.read_text().replace("params/embedding", "params/embed"))
    with pytest.raises(LayoutError, match=rf"{layout}: rules\[2\]"):
        begun(configured(tmp_path / "other", corpus, **foreign))


@pytest.mark.slow
def test_run_begins_with_a_step_of_ours_and_reads_it_once(
    tmp_path, corpus, monkeypatch
):
    config = configured(tmp_path / "source", corpus, init_weights_seed=7)
    saved = jax.tree.map(np.asarray, jobs.trained(jobs.assembled(config)).state)
    step = tmp_path / "source" / "tiny" / "checkpoints" / "2"
    root = persistent_root.PersistentRoot.from_path(step.parent)
    leased = []
    read = loading.load_leaves

    def load_leased(*arguments, **options):
        leased.append(leases.leased(root, {}))
        return read(*arguments, **options)

    monkeypatch.setattr(loading, "load_leaves", load_leased)
    keys = {"init_from": str(step), "steps": 1}
    check_begun(begun(configured(tmp_path / "begun", corpus, **keys)), saved["params"])
    # Its run does not remove it meanwhile.
    assert (leased, leases.leased(root, {})) == ([{2}], set())
    recorded = RecordedEvents()
    for given in (keys, {"init_from": "/gone", "steps": 2}):
        config = configured(tmp_path / "run", corpus, **given)
        jobs.trained(jobs.assembled(config, emit=recorded))
    assert recorded.named("weights_skipped") == [{"path": "/gone", "step": 1}]
    keys = {"init_from": str(step), "base_num_decoder_layers": 3}
    with pytest.raises(errors.ElasticCkptError, match=r"a different model.*params/att"):
        begun(configured(tmp_path / "other", corpus, **keys))
