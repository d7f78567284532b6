"""A run of ours goes on from the whole train state in a checkpoint of another."""

import pathlib

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import universal
from elastic_ckpt.core import errors, storage
from tests import jobs
from tests.training import foreign_states
from tests.training import test_initial_weights as weights
from tests.universal.formats import llama_values as llama

STEPS = llama.STEPS + 3
SAVED_ON = (2, 4)
# The same float32 sums in another order, over other devices.
LOSS_RTOL = 1e-3


def assembled(directory, corpus, devices, **settings):
    values = {
        "steps": STEPS,
        "enable_checkpointing": False,
        "init_from_optimizer": True,
        **llama.SIZES,
    }
    config = weights.configured(directory, corpus, **{**values, **settings})
    slices, num_devices = devices
    return jobs.assembled(config, slices=slices, devices=num_devices)


def losses(directory, corpus, devices, **settings):
    """The losses of the steps of a run that goes on."""
    jobs.trained(assembled(directory, corpus, devices, **settings))
    losses = jobs.losses(directory)
    assert list(losses) == list(range(llama.STEPS, STEPS))
    return list(losses.values())


def state_of(params, abstract):
    """The train state of ours, with the values of `params`."""
    parts = {"mu": params("exp_avg"), "nu": params("exp_avg_sq")}
    adam = abstract["opt_state"][1][0]._replace(**parts)
    clip, (_, *rest) = abstract["opt_state"]
    state = {"params": params("fp32"), "opt_state": (clip, (adam, *rest))}
    return jax.tree.map(
        lambda leaf: (
            np.asarray(llama.STEPS, leaf.dtype)
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else leaf
        ),
        state | {"step": abstract["step"]},
    )


@pytest.fixture(scope="module")
def of_orbax(tmp_path_factory, corpus):
    """The losses of a run from the same state, which Orbax saved."""
    held = {}

    def of_orbax(params, devices):
        if (params, devices) not in held:
            folder = tmp_path_factory.mktemp("of_orbax")
            job = assembled(folder / "abstract", corpus, devices)
            state = state_of(params, job.loop.program.abstract_state)
            job.close()
            ocp.save_checkpointables(folder / "2", {"state": state})
            keys = {"init_from": str(folder / "2")}
            held[params, devices] = losses(folder / "run", corpus, devices, **keys)
        return held[params, devices]

    return of_orbax


def keys_of(name, tmp_path):
    source = foreign_states.SOURCES[name]
    path, layout = source.write(tmp_path), tmp_path / "layout.yml"
    assert universal.open_checkpoint(path).format == name
    layout.write_text(source.layout)
    return {"init_from": str(path), "init_from_layout": str(layout)}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [SAVED_ON, (1, 2)])
@pytest.mark.parametrize("name", foreign_states.SOURCES)
def test_losses_are_those_from_the_same_state_saved_by_orbax(
    tmp_path, corpus, of_orbax, name, devices
):
    source, keys = foreign_states.SOURCES[name], keys_of(name, tmp_path)
    continued = losses(tmp_path / "run", corpus, devices, **keys)
    assert continued == of_orbax(source.params, devices)
    np.testing.assert_allclose(
        continued, of_orbax(source.params, SAVED_ON), rtol=LOSS_RTOL
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepSpeed ZeRO-3", "safetensors"])
def test_losses_from_a_bucket_are_those_from_orbax(
    tmp_path, corpus, of_orbax, bucket, name
):
    keys = keys_of(name, tmp_path)
    local = pathlib.Path(keys["init_from"])
    for file in [local] if local.is_file() else local.rglob("*"):
        if file.is_file():
            copy = storage.absolute(f"{bucket}/{file.relative_to(local.parent)}")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    keys["init_from"] = f"{bucket}/{local.name}"
    continued = losses(tmp_path / "run", corpus, SAVED_ON, **keys)
    assert continued == of_orbax(foreign_states.SOURCES[name].params, SAVED_ON)


@pytest.mark.slow
def test_a_layout_may_fill_counts_and_weights_alone_begin_with_step_0(tmp_path, corpus):
    keys = keys_of("Megatron mp_rank", tmp_path)
    layout = pathlib.Path(keys["init_from_layout"])
    layout.write_text(
        layout.read_text().replace("fill: {", "fill: {opt_state/1/2/count: 7, ")
    )
    states = {}
    for is_whole in (True, False):
        keys["init_from_optimizer"] = is_whole
        job = assembled(tmp_path / "run", corpus, SAVED_ON, **keys)
        states[is_whole] = jobs.begun(job)
    _, (adam, _, schedule) = states[True]["opt_state"]
    assert int(adam.count) == int(states[True]["step"]) == llama.STEPS
    assert int(schedule.count) == 7
    assert int(states[False]["step"]) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(states[False]["opt_state"]))
    params = [np.asarray(states[each]["params"]["qkv"]) for each in states]
    assert params[0].tobytes() == params[1].tobytes()


@pytest.mark.slow
def test_a_step_beyond_those_of_the_run_is_refused(tmp_path, corpus):
    keys = keys_of("Megatron mp_rank", tmp_path)
    job = assembled(tmp_path / "run", corpus, SAVED_ON, steps=1, **keys)
    with pytest.raises(errors.ConfigError, match="is already at step 2"):
        jobs.begun(job)
