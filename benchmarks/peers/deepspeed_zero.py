"""Writes a checkpoint as DeepSpeed's ZeRO-1 saves it: the layers of a decoder.

It runs alone, in an environment with torch and DeepSpeed:

    python benchmarks/peers/deepspeed_zero.py FOLDER LAYERS EMBED HIDDEN RANKS

The states are random, and nothing is trained. Each data-parallel rank has a range of
the flat masters and moments, in one group; so some parameters are cut.
"""

from __future__ import annotations

import collections
import pathlib
import sys
from typing import Any

_VERSION = "0.19.8"
_STATE_KEYS = ("exp_avg", "exp_avg_sq")


def _shapes(layers: int, embed: int, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        before = f"layers.{layer}"
        for name in ("query", "key", "value", "out"):
            shapes[f"{before}.{name}.weight"] = embed, embed
        shapes[f"{before}.gate.weight"] = hidden, embed
        shapes[f"{before}.up.weight"] = hidden, embed
        shapes[f"{before}.down.weight"] = embed, hidden
        shapes[f"{before}.norm"] = (embed,)
    return shapes


def _mappings(shapes: dict[str, tuple[int, ...]], start: int, stop: int) -> Any:
    # The ranges of the parameters that a rank has, from `start` to `stop` of all.
    import torch
    from deepspeed.utils.tensor_fragment import fragment_address

    mappings, first = collections.OrderedDict(), 0
    for name, shape in shapes.items():
        after = first + torch.Size(shape).numel()
        held = max(first, start), min(after, stop)
        if held[0] < held[1]:
            mappings[name] = fragment_address(
                numel=held[1] - held[0], start=held[0] - start
            )
        first = after
    return mappings


def _optimizer(mappings: Any, size: int, numel: int, ranks: int) -> dict[str, Any]:
    import torch
    from deepspeed.runtime.zero.config import ZeroStageEnum

    # Moments are padded, masters are not.
    state: dict[str, Any] = {"step": torch.tensor(2.0)}
    state |= {key: torch.rand(size) for key in _STATE_KEYS}
    options = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    return {
        "dynamic_loss_scale": False,
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": {
            "state": {0: state},
            "param_groups": [{**options, "params": [0]}],
        },
        "single_partition_of_fp32_groups": [torch.nn.Parameter(torch.rand(numel))],
        "zero_stage": ZeroStageEnum.optimizer_states,
        "group_paddings": [size - numel],
        "partition_count": [ranks],
        "ds_version": _VERSION,
        "param_slice_mappings": [mappings],
    }


def _write_model(path: pathlib.Path, shapes: dict[str, Any], ranks: int) -> None:
    import torch

    module = collections.OrderedDict(
        (name, torch.rand(shape).bfloat16()) for name, shape in shapes.items()
    )
    sizes = collections.OrderedDict(
        (name, torch.Size(shape)) for name, shape in shapes.items()
    )
    content = {
        "module": module,
        "buffer_names": [],
        "param_shapes": [sizes],
        "frozen_param_shapes": None,
        "shared_params": {},
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"zero_optimization": {"stage": 1}},
        "ds_version": _VERSION,
        "iteration": 2,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    torch.save(content, path)


def write(
    folder: pathlib.Path, *, layers: int, embed: int, hidden: int, ranks: int
) -> None:
    """Writes the files of all ranks into a new folder."""
    import torch

    folder.mkdir(parents=True)
    shapes = _shapes(layers, embed, hidden)
    _write_model(folder / "mp_rank_00_model_states.pt", shapes, ranks)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    size = -(-total // ranks)
    for rank in range(ranks):
        start, stop = rank * size, min((rank + 1) * size, total)
        mappings = _mappings(shapes, start, stop)
        file = folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        states = _optimizer(mappings, size, stop - start, ranks)
        torch.save({"optimizer_state_dict": states, "ds_version": _VERSION}, file)


if __name__ == "__main__":
    sizes = dict(
        zip(("layers", "embed", "hidden", "ranks"), map(int, sys.argv[2:]), strict=True)
    )
    write(pathlib.Path(sys.argv[1]), **sizes)
