r"""Loads a universal checkpoint of ours with DeepSpeed, and compares every state.

First, in the environment of this project, write one from a sample of DeepSpeed's:

    uv run python -m tests.universal.writing.load_with_deepspeed write /tmp/universal

Then load it in an environment with torch 2.13.0 and deepspeed 0.19.8, at any stage:

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc-per-node 2 \
        tests/universal/writing/load_with_deepspeed.py load /tmp/universal 3
"""

import pathlib
import sys
import tempfile

from tests.universal.formats import known_values as kv

SAMPLE = "zero1_dp2_universal"


def write(folder):
    from elastic_ckpt.universal import opening
    from elastic_ckpt.universal.writing.universal_folder import UniversalFolder
    from tests.universal.formats import stored_values

    written = UniversalFolder(folder, tag="step2")
    with tempfile.TemporaryDirectory() as name:
        path = stored_values.unpacked(f"deepspeed/{SAMPLE}.tar.xz", pathlib.Path(name))
        for tensor in opening.open_checkpoint(path).tensors:
            written.write(tensor.name, tensor.kind, stored_values.read(tensor))
    written.commit(step=2)


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
    config = write_deepspeed.config(stage, "bf16", torch.distributed.get_world_size())
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=write_deepspeed.groups(model, 0),
        config={**config, "checkpoint": {"load_universal": True}},
    )
    engine.load_checkpoint(folder)
    compared = 0
    for name, parameter in engine.module.named_parameters():
        held = tuple(getattr(parameter, "ds_shape", parameter.shape))
        for key in kv.STATES:
            array = kv.of_rank(key, name, kv.full_shape(name, held), 0, 1)
            if key == "fp32":
                value = safe_get_full_fp32_param(parameter)
            else:
                value = safe_get_full_optimizer_state(parameter, key)
            assert value.numpy().tobytes() == array.tobytes(), (name, key)
            compared += 1
    print(f"{compared} states are bit-equal at stage {stage}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2])
    else:
        load(sys.argv[2], int(sys.argv[3]))
