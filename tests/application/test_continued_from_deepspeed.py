"""A run of ours goes on from the whole train state that DeepSpeed's format holds.

The checkpoint is written by this test, in the files of DeepSpeed's universal format.
"""

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import universal
from elastic_ckpt.application.assemble import assemble
from elastic_ckpt.core import topology
from elastic_ckpt.training import step_log
from tests.application import test_initial_weights as weights
from tests.universal.formats import torch_files

# All parameters have the same number of steps, which our state has three times.
LAYOUT = """version: 1
states:
  master: {from: "{}", to: "params/{}"}
  first_moment: {from: "{}", to: "opt_state/1/0/mu/{}"}
  second_moment: {from: "{}", to: "opt_state/1/0/nu/{}"}
rules:
  - from: {"model.layers.{name:path}": {dims: "", replicated: [name]}}
    to: {"opt_state/1/{at}/count": {dims: "", replicated: [at]}}
    kind: step
  - from: {"model.{name}.weight": {dims: "", replicated: [name]}}
    to: {"step": ""}
    kind: step
"""
# The same float32 sums in another order, over other devices.
LOSS_RTOL = 1e-3


def write_universal(folder, state):
    """Writes a train state in DeepSpeed's universal format."""
    adam = state["opt_state"][1][0]
    step = np.asarray(state["step"], np.int32)
    parts = {"fp32": state["params"], "exp_avg": adam.mu, "exp_avg_sq": adam.nu}
    parts = {
        key: weights.as_other_program_has_it(jax.tree.map(np.asarray, tree))
        for key, tree in parts.items()
    }
    (folder / "latest_universal").write_text("step")
    for name in parts["fp32"]:
        directory = folder / "step" / "zero" / name
        directory.mkdir(parents=True)
        for key, tensors in parts.items():
            write_tensor(directory / f"{key}.pt", tensors[name], "FloatStorage", True)
        write_tensor(directory / "step.pt", step, "IntStorage", False)


def write_tensor(path, array, kind, is_in_dict):
    strides = tuple(each // array.itemsize for each in array.strides)
    tensor = torch_files.tensor(array.shape, strides, elements=array.size, kind=kind)
    entries = {"data/0": np.ascontiguousarray(array).tobytes()}
    value = {"param": tensor} if is_in_dict else tensor
    torch_files.write(path, value, entries=entries)


def steps_after(directory, corpus, devices, state_of):
    """The losses of two more steps of a run, from a state for its shardings."""
    slices, devices = devices
    config = weights.configured(directory, corpus, steps=5, enable_checkpointing=False)
    world = topology.Topology(hosts=1, slices=slices, devices=devices)
    job = assemble(config, world, devices=jax.devices()[:devices])
    job.run(state_of(job.program.abstract_state))
    job.close()
    (attempt,) = step_log.read(directory / "tiny")
    return [record.loss for record in attempt.records]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, corpus):
    """The same state as a step that was saved by Orbax, and in DeepSpeed's files."""
    folder = tmp_path_factory.mktemp("deepspeed")
    config = weights.configured(folder / "source", corpus, steps=3)
    job = weights.assembled(config)
    ended = job.run(job.restore_or_init())
    job.close()
    write_universal(folder, ended.state)
    layout = folder / "layout.yml"
    rules = weights.LAYOUT.partition("rules:\n")[2].replace("params/", "")
    layout.write_text(LAYOUT + rules)
    return folder, layout


@pytest.mark.parametrize(
    "devices", [(2, 4), pytest.param((1, 2), marks=pytest.mark.slow(minutes=0.5))]
)
def test_losses_are_those_from_the_same_state_saved_by_orbax(
    tmp_path, corpus, checkpoints, devices
):
    folder, layout = checkpoints

    def from_orbax(abstract):
        step = folder / "source" / "tiny" / "checkpoints" / "3"
        return ocp.load_checkpointables(step, {"state": abstract})["state"]

    def from_deepspeed(abstract):
        return universal.load(folder, abstract, layout=layout)

    expected = steps_after(tmp_path / "orbax", corpus, devices, from_orbax)
    losses = steps_after(tmp_path / "deepspeed", corpus, devices, from_deepspeed)
    assert losses == expected
    assert len(losses) == 2
    if devices != (2, 4):
        first = steps_after(tmp_path / "first", corpus, (2, 4), from_deepspeed)
        # As on the mesh of the source.
        np.testing.assert_allclose(losses, first, rtol=LOSS_RTOL)
