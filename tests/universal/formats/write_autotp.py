r"""Writes a checkpoint of DeepSpeed's AutoTP under ZeRO-3 on CPU.

In an environment with torch 2.13.0 and deepspeed 0.19.8:

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc-per-node 4 \
        tests/universal/formats/write_autotp.py /tmp/samples

Two tensor-parallel and two data-parallel ranks. DeepSpeed cuts the model and describes
how. The learning rate is zero: weights stay `known_values`, and moments are trained.
`write_deepspeed.py` converts the sample, and shows how it is packed.
"""

import pathlib
import sys

import deepspeed
import torch
from torch import nn

from tests.universal.formats import known_values as kv

SAMPLE = "zero3_autotp2_dp2"
EMBED, FF, STEPS = 8, 12, 2


class Block(nn.Module):
    """Linear layers of the names that the settings below cut."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(EMBED)
        self.q_proj = nn.Linear(EMBED, 16)
        self.k_proj = nn.Linear(EMBED, 8, bias=False)
        self.o_proj = nn.Linear(16, EMBED)
        self.gate_up_proj = nn.Linear(EMBED, 2 * FF, bias=False)
        self.down_proj = nn.Linear(FF, EMBED, bias=False)

    def forward(self, hidden):
        scale = 1 + self.k_proj(hidden).mean(-1, keepdim=True)
        hidden = hidden + self.o_proj(self.q_proj(self.norm(hidden)) * scale)
        gate, up = self.gate_up_proj(hidden).chunk(2, -1)
        return hidden + self.down_proj(gate * up)


class Model(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(kv.VOCAB, EMBED)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(EMBED, kv.VOCAB, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).float().square().mean()


def cut(kind, *names, **options):
    patterns = [rf".*\.{name}\.weight$" for name in names]
    return {"patterns": patterns, "partition_type": kind, **options}


def config():
    layers = [
        cut("row", "o_proj", "down_proj"),
        cut("column", "q_proj", "k_proj"),
        cut("column", "gate_up_proj", shape=[2, -1], partition_dim=0),
    ]
    parallel = {"use_default_specs": False, "layer_specs": layers}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.0, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {"autotp_size": 2, "partition_config": parallel},
    }


def main(folder):
    deepspeed.init_distributed("gloo")
    model = Model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = kv.known("fp32", name, tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(values))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config()
    )
    for _ in range(STEPS):
        engine.backward(engine(torch.arange(5)[None]))
        engine.step()
    engine.save_checkpoint(folder / SAMPLE, client_state={"iteration": STEPS})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
