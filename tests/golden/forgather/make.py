"""Makes the fixtures here: files of torch.save, in the layout of Forgather's trainers.

    python -m venv /tmp/torch && /tmp/torch/bin/pip install torch==2.13.0 numpy
    /tmp/torch/bin/python tests/golden/forgather/make.py

`values.npz` has what a reader has to find. Needs torch alone; nothing else here does.
"""

import collections
import json
import os
import pathlib
import struct
import sys
import zipfile

import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
VALUES = {}


def main():
    torch.manual_seed(3)
    pipeline(HERE / "pipeline-2x2")
    single(HERE / "single")
    types(HERE / "types.pt")
    np.savez_compressed(HERE / "values.npz", **VALUES)
    for path in sorted(HERE.rglob("*")):
        print(path.relative_to(HERE), path.stat().st_size)


def noted(name, tensor):
    """The tensor; its bits are kept for the test."""
    if tensor.dtype == torch.bfloat16:
        VALUES[name] = tensor.contiguous().view(torch.int16).numpy()
    else:
        VALUES[name] = tensor.detach().numpy()
    return tensor


def rng(name):
    return {
        "torch_rng_state": noted(name, torch.randint(0, 256, (40,), dtype=torch.uint8)),
        "initial_seed": 2**63 + 11,
    }


def optimizer(prefix, shape):
    model = torch.nn.Linear(*shape)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(1, shape[0])).sum().backward()
    adam.step()
    state = adam.state_dict()
    for number, moments in state["state"].items():
        for name, tensor in moments.items():
            noted(f"{prefix}/{number}/{name}", tensor)
    return state


def entry(key, pattern, ranks, size, group=None):
    shared = [0, 1, 2, 3] if pattern == "replicated" else None
    return {
        "key": key,
        "sharing_pattern": pattern,
        "ranks": ranks,
        "replicated_across": shared,
        "group_name": group,
        "size_bytes": size,
        "checksum": None,
        "metadata": {},
    }


def write_manifest(directory, world_size, entries):
    manifest = {
        "checkpoint_path": f"/output/{directory.name}",
        "world_size": world_size,
        "timestamp": "2026-01-24T10:30:45.123456",
        "components": {each["key"]: each for each in entries},
        "training_args_hash": None,
        "forgather_version": None,
        "pytorch_version": torch.__version__,
        "metadata": {},
    }
    (directory / "checkpoint_manifest.json").write_text(json.dumps(manifest, indent=2))


def write_index(directory, name, weight_map):
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / name).write_text(json.dumps(index, indent=4))


def write_safetensors(path, tensors):
    header, content = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        values = tensor.detach().numpy().tobytes()
        spans = [len(content), len(content) + len(values)]
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": spans,
        }
        content += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def pipeline(directory):
    """Four ranks: two stages, each with two replicas; hybrid DDP x pipeline."""
    directory.mkdir(exist_ok=True)
    weight_map = {}
    for stage in range(2):
        name = f"layers.{stage}.weight"
        file = f"pytorch_model-{stage + 1:05}-of-00002.bin"
        shard = collections.OrderedDict({name: noted(name, torch.randn(3, 4))})
        torch.save(shard, directory / file, _use_new_zipfile_serialization=True)
        weight_map[name] = file
        # The leader of each data-parallel group; its rank in the group is 0.
        suffix = f"group_dp_group_grank_0_rank_{stage}"
        torch.save(
            optimizer(f"optimizer{stage}", (2 + stage, 3)),
            directory / f"optimizer_state_{suffix}.pt",
        )
    write_index(directory, "pytorch_model.bin.index.json", weight_map)
    scheduler = {"base_lrs": [0.01], "last_epoch": 7, "_last_lr": [0.0075], "f": None}
    torch.save(scheduler, directory / "scheduler_state.pt")
    torch.save({"global_step": 7, "epoch": 0.5}, directory / "trainer_state.pt")
    torch.save(
        {"_index": 40, "_dataset": {"shards": [1, 2], "name": "web"}},
        directory / "dataset_state.pt",
    )
    for rank in range(4):
        torch.save(rng(f"rng{rank}"), directory / f"rng_state_rank_{rank}.pt")
    for node in range(2):
        cache = {"node": node, "hits": torch.tensor(5 + node)}
        torch.save(cache, directory / f"cache_state_node_{node}_rank_{2 * node}.pt")
    callback = {"window": [2.5, 2.25], "best": 2.25, "bad_steps": 0}
    torch.save(
        {
            "best_checkpoints": [("/output/checkpoint-5", 2.25)],
            "callback_states": {"callback_0_DualTimeScale": callback},
        },
        directory / "checkpoint_metadata.pt",
    )
    write_manifest(
        directory,
        4,
        [
            entry("optimizer", "per_group", [0, 1], 1, "dp_group"),
            entry("scheduler", "replicated", [0], 1),
            entry("trainer", "global", [0], 1),
            entry("dataset", "global", [0], 1),
            entry("rng", "per_rank", [0, 1, 2, 3], 1),
            entry("cache", "per_node", [0, 2], 1),
        ],
    )


def single(directory):
    """One process, weights in safetensors."""
    directory.mkdir(exist_ok=True)
    weights = {
        name: noted(f"single/{name}", torch.randn(shape))
        for name, shape in {"embed.weight": (5, 2), "head.weight": (2, 5)}.items()
    }
    write_safetensors(directory / "model-00001-of-00001.safetensors", weights)
    write_index(
        directory,
        "model.safetensors.index.json",
        dict.fromkeys(weights, "model-00001-of-00001.safetensors"),
    )
    torch.save(optimizer("single", (2, 2)), directory / "optimizer_state.pt")
    torch.save({"global_step": 3}, directory / "trainer_state.pt")
    torch.save(rng("single/rng"), directory / "rng_state_rank_0.pt")
    write_manifest(
        directory,
        1,
        [
            entry("optimizer", "global", [0], 1),
            entry("trainer", "global", [0], 1),
            entry("rng", "per_rank", [0], 1),
        ],
    )


def types(path):
    """Tensors of every kind, views, and values beside them."""
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {
        "view": whole[1:3, ::2],
        "transposed": whole.T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 7),
        "bfloat16": torch.arange(5, dtype=torch.bfloat16) / 3,
        "float16": torch.arange(3, dtype=torch.float16),
        "complex64": torch.tensor([1 + 2j]),
        "bool": torch.tensor([True, False]),
        **{
            str(kind).removeprefix("torch."): torch.arange(3).to(kind)
            for kind in (
                *(torch.int8, torch.int16, torch.int32, torch.int64),
                *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
            )
        },
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    for name, tensor in tensors.items():
        noted(f"types/{name}", tensor)
    torch.save(
        {
            "tensors": tensors,
            "same": [whole, whole],
            "dtype": torch.bfloat16,
            "size": torch.Size([2, 3]),
            "device": torch.device("cpu"),
            "bytes": b"\x00\xff",
            "set": {1, 2},
            "counter": collections.Counter({3: 1}),
            "numbers": [1, -1, 2**40, -(2**70), 0.5, float("inf"), True, None],
            "tuple": (1, ("two", {"three": [4]})),
        },
        path,
    )
    with zipfile.ZipFile(path) as archive:
        assert {info.compress_type for info in archive.infolist()} == {0}


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
