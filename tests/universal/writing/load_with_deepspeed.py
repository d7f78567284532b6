r"""Loads universal checkpoints of ours with DeepSpeed, and compares every state.

First, in the environment of this project, convert a sample of DeepSpeed's, and a state
of JAX in a step of Orbax, through the inverse of a layout:

    python -m tests.universal.writing.load_with_deepspeed write /tmp/universal

Then load both in an environment with torch 2.13.0 and deepspeed 0.19.8, at any stage
and number of data-parallel ranks:

    for source in zero1_dp2 jax; do for ranks in 1 2; do for stage in 1 2 3; do
        DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PYTHONPATH=. torchrun \
            --nproc-per-node $ranks tests/universal/writing/load_with_deepspeed.py \
            load /tmp/universal/$source $stage
    done; done; done
"""

import pathlib
import sys

from tests.universal.formats import known_values as kv

SAMPLE = "zero1_dp2"
STEP = 2


def write(folder):
    from tests.universal.formats import stored_values

    (folder / "sources").mkdir(parents=True)
    sample = stored_values.unpacked(f"deepspeed/{SAMPLE}.tar.xz", folder / "sources")
    convert(sample, folder / SAMPLE)
    convert_from_jax(folder / "sources", folder / "jax")


def convert(source, target, *options):
    from elastic_ckpt.cli import main

    paths = [str(source), str(target)]
    assert main.main(["convert", *paths, "--to", "deepspeed", *options]) == 0


def convert_from_jax(folder, target):
    """Saves a state of JAX in `folder`, and converts it."""
    layout, step = folder / "layout.yml", folder / "0"
    layout.write_text(layout_text())
    save_with_orbax(step)
    convert(step, target, "--rules", str(layout), "--reverse")


def layout_text():
    """From files of DeepSpeed to a tree of scanned layers, and invertible."""
    from tests.universal import gpt_layout

    text = gpt_layout.layout_text(
        [], tp=1, is_pipeline=False, masters=True, has_frozen=True, has_steps=False
    )
    text = text.replace("  parameter:", "  #")
    for kind in ("master", "first_moment", "second_moment"):
        text = text.replace(f'{kind}: {{from: "', f'{kind}: {{from: "{kind}/')
    text = text.replace("  {vocab:", "  {pad: 3, layer: 4, vocab:")
    # One number of steps is that of all parameters.
    count = '  - from: {"step/frozen": ""}\n    to: {"count": ""}\n'
    return text.replace("drop: []", f"{count}    kind: step")


def save_with_orbax(path):
    import jax
    from orbax.checkpoint import v1 as ocp

    from tests.universal import gpt_layout

    tree = gpt_layout.known_tree(is_pipeline=False, tp=1, has_frozen=True)
    ocp.save(path, jax.tree.map(jax.numpy.asarray, tree))


def load(folder, stage):
    import deepspeed
    import torch
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
    )

    from tests.universal.formats import write_deepspeed

    deepspeed.init_distributed("gloo")
    model = write_deepspeed.Model(0, frozen=False)
    # With a threshold of zero, ZeRO-3 divides all parameters.
    config = write_deepspeed.config(stage, "bf16", processes=4)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=write_deepspeed.groups(model, 0),
        config={**config, "checkpoint": {"load_universal": True}},
    )
    engine.load_checkpoint(folder)
    compared = 0
    for name, parameter in engine.module.named_parameters():
        held = tuple(getattr(parameter, "ds_shape", parameter.shape))
        arrays = {
            key: torch.from_numpy(
                kv.of_rank(key, name, kv.full_shape(name, held), 0, 1)
            )
            for key in kv.STATES
        }
        states = {"fp32": safe_get_full_fp32_param(parameter)}
        for key in ("exp_avg", "exp_avg_sq"):
            states[key] = safe_get_full_optimizer_state(parameter, key)
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            states["weight"] = parameter.detach().clone()
        arrays["weight"] = arrays["fp32"].bfloat16()
        for key, array in arrays.items():
            assert states[key].shape == array.shape, (name, key)
            assert states[key].dtype == array.dtype, (name, key)
            bits, known = (each.view(torch.uint8) for each in (states[key], array))
            assert torch.equal(bits, known), (name, key)
            compared += 1
    steps = {
        float(state["step"])
        for state in engine.optimizer.optimizer.state.values()
        if "step" in state
    }
    assert steps == {STEP}, steps
    assert engine.global_steps == STEP
    # It goes on from there.
    engine.backward(engine(torch.arange(5)[None]))
    engine.step()
    ranks = torch.distributed.get_world_size()
    print(f"{compared} states are bit-equal at stage {stage}, {ranks} ranks")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(pathlib.Path(sys.argv[2]))
    else:
        load(sys.argv[2], int(sys.argv[3]))
