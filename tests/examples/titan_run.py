"""torchtitan on the CPU, with a loader that notes the rows that it yields.

    python -m torch.distributed.run ... -m tests.examples.titan_run KEYS

To be run where torch and torchtitan are installed. The rows of each batch are appended
to a file in the directory `ROWS` of the environment.
"""

import dataclasses
import functools
import json
import os
import types

import torch
from torch.distributed import fsdp

# torchtitan takes "cuda" where PyTorch finds no device, and asks the module of a device
# for what torch.cpu does not have.
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda _: "CPU"
torch.cpu.get_device_properties = lambda _: types.SimpleNamespace(total_memory=1)
torch.cpu.memory_stats = lambda _: {}
torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda: None

import torchtitan_loader  # noqa: E402
from torchtitan import train  # noqa: E402
from torchtitan.protocols import train_spec  # noqa: E402


class NotingLoader(torchtitan_loader.ElasticDataLoader):
    """Appends a line to a file for each batch: what the trainer was given."""

    def __iter__(self):
        world = f"{os.environ['WORLD_SIZE']}-{os.environ['RANK']}"
        with open(os.path.join(os.environ["ROWS"], f"{world}.jsonl"), "a") as file:
            for features, labels in super().__iter__():
                line = {"input": features["input"].tolist(), "labels": labels.tolist()}
                print(json.dumps(line), file=file, flush=True)
                yield features, labels


def noting(**given):
    loader = torchtitan_loader.build_dataloader(**given)
    loader.__class__ = NotingLoader
    return loader


def parallelized(model, *given, parallelize, **more):
    model = parallelize(model, *given, **more)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            # Gloo cannot divide gradients while it sums them.
            module.set_force_sum_reduction_for_comms(True)
    return model


def main():
    llama = train_spec.get_train_spec("llama3")
    small = dataclasses.replace(llama.model_args["debugmodel"], dim=32, n_layers=1)
    spec = dataclasses.replace(
        llama,
        model_args={"small": small},
        parallelize_fn=functools.partial(
            parallelized, parallelize=llama.parallelize_fn
        ),
        build_dataloader_fn=noting,
        build_tokenizer_fn=None,
    )
    train_spec.register_train_spec("elastic", spec)
    train.main(train.Trainer)


if __name__ == "__main__":
    main()
