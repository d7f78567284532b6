"""Suite `universal`: loads of checkpoints with different layouts, and plain loads.

* `relayout_load_ratio_plain_orbax`: a load of an Orbax checkpoint that transposes all
  matrices and stacks all layers, relative to Orbax's load of the same state, saved in
  its final layout; `_unchanged`: relative to Orbax's load of the same files unchanged.
* `safetensors_load_ratio_orbax_outer`: a load of safetensors without changes, sharded
  on the outer dim, relative to Orbax's load of the same files.
* `read_over_needed_percent_torch`: the bytes that 128 hosts read from torch.save files,
  including reads for checksums, relative to the bytes that they need.
* `convert_ratio_cp`: the time for a durable copy of the same bytes relative to a
  conversion to an Orbax step; `_safetensors`: to safetensors.
* `plan_experts_secs`: the time for a host's plan for a model with 60 layers of 256
  experts, saved by 8 ranks; `open_match_and_plan_dcp_secs`: the time from PyTorch
  distributed checkpoint files with 1e6 tensors and rules to a host's plan.

The loaded state is a decoder's layers in float32, with one tensor per matrix of a
layer, as `[out, in]`. The target has all layers stacked and every matrix transposed,
`[layer, in, out]`. Every leaf is sharded over two CPU devices of one process. The sides
take turns, and a ratio compares two turns of a round; all files are in the page cache.
Copied files are synced, and a side's output is removed before the next side.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from benchmarks import report, sized, turns, universal_plan
from elastic_ckpt import universal
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.writing import convert

_ROUNDS = sized(3, 1)
_DEVICES = 2
# The loaded state: 10 matrices of `_EMBED` x `_EMBED` elements per layer.
_LAYERS = sized(26, 2)
_EMBED = sized(2048, 64)
_HIDDEN = 2 * _EMBED
_MATRICES = {
    **dict.fromkeys(("query", "key", "value", "out"), (_EMBED, _EMBED)),
    **dict.fromkeys(("gate", "up"), (_HIDDEN, _EMBED)),
    "down": (_EMBED, _HIDDEN),
}
_MATRIX, _NORM = "layers.{layer}.{name}.weight", "layers.{layer}.norm"
_UNCHANGED = {_MATRIX: {_MATRIX: "out in"}, _NORM: {_NORM: "embed"}}
_STACKED = {
    _MATRIX: {"layers/{name}/kernel": "layer in out"},
    _NORM: {"layers/norm": "layer embed"},
}
# The converted files, which have matrices of 32 MiB.
_FILES = sized(4, 2)
_FILE_MATRICES = sized(32, 1)
_RULE = {
    "from": {"layers.{layer}.weight": "out embed"},
    "to": {"layers/{layer}/w": "out embed"},
}


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    loads = turns.in_new_process(_loads)
    return loads | _conversions() | universal_plan.measure()


def _loads() -> dict[str, report.Figure]:
    # Runs in a process that has not used devices.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={_DEVICES}"
    jax.config.update("jax_platforms", "cpu")
    num_bytes = 4 * _LAYERS * sum(map(math.prod, _layer(0).values()))
    with tempfile.TemporaryDirectory() as directory:
        raw, layers, stacked = (
            pathlib.Path(directory, name) for name in ("raw", "layers", "stacked")
        )
        raw.mkdir()
        for number in range(_LAYERS):
            _write(raw / f"{number:05d}.safetensors", _layer(number), seed=number)
        ocp.save(str(layers), _unchanged(raw, 1))
        ocp.save(str(stacked), _relayout(raw))
        context = ocp.Context()
        context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS

        def by_orbax() -> Any:
            with context:
                return ocp.load(str(raw), _layers(0))

        sides = {
            "ours": lambda: _unchanged(raw, 0),
            "orbax": by_orbax,
            "plain": lambda: ocp.load(str(stacked), _stacked()),
            "plain_layers": lambda: ocp.load(str(layers), _layers(1)),
            "relayout": lambda: _relayout(layers),
        }
        # Sides with the same structure must return the same values.
        loaded = {name: sides[name]() for name in ("plain", "relayout")}
        is_same = jax.tree.map(lambda a, b: bool((a == b).all()), *loaded.values())
        assert jax.tree.all(is_same)
        del loaded
        secs = turns.timed(
            {
                name: lambda load=load: jax.block_until_ready(load())
                for name, load in sides.items()
            },
            _ROUNDS,
            num_bytes=num_bytes,
        )
    return {
        "safetensors_load_ratio_orbax_outer": report.ratio(
            secs["ours"],
            secs["orbax"],
            "at most 1.0; Orbax's load of safetensors, sharded on the outer dim",
        ),
        "relayout_load_ratio_plain_orbax": report.ratio(
            secs["relayout"], secs["plain"], "at most 1.2; Orbax's load of the target"
        ),
        "relayout_load_ratio_plain_orbax_unchanged": report.ratio(
            secs["relayout"],
            secs["plain_layers"],
            "Orbax's load of the same files, unchanged",
        ),
    }


def _unchanged(path: pathlib.Path, dim: int) -> Any:
    return universal.load(path, _layers(dim), layout=_layout(_UNCHANGED))


def _relayout(path: pathlib.Path) -> Any:
    return universal.load(path, _stacked(), layout=_layout(_STACKED))


def _layout(targets: Mapping[str, Mapping[str, str]]) -> Layout:
    dims = {_MATRIX: "out in", _NORM: "embed"}
    rules = [
        {"from": {name: dims[name]}, "to": target} for name, target in targets.items()
    ]
    return Layout.from_dict({"rules": rules})


def _layer(number: int) -> dict[str, tuple[int, ...]]:
    # The names and shapes of a layer's tensors.
    matrices = {
        f"layers.{number}.{name}.weight": shape for name, shape in _MATRICES.items()
    }
    return {f"layers.{number}.norm": (_EMBED,), **matrices}


def _layers(dim: int) -> Any:
    # Every matrix is sharded along `dim`.
    return {
        name: _leaf(shape, dim if len(shape) > 1 else 0)
        for layer in range(_LAYERS)
        for name, shape in _layer(layer).items()
    }


def _stacked() -> Any:
    kernels = {
        name: {"kernel": _leaf((_LAYERS, *reversed(shape)), 1)}
        for name, shape in _MATRICES.items()
    }
    return {"layers": {**kernels, "norm": _leaf((_LAYERS, _EMBED), 1)}}


def _leaf(shape: tuple[int, ...], dim: int) -> jax.ShapeDtypeStruct:
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * dim, "data"))
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


def _conversions() -> dict[str, report.Figure]:
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        source, target = path / "source", path / "target"
        source.mkdir()
        target.mkdir()
        for number in range(_FILES):
            first = number * _FILE_MATRICES
            matrices = range(first, first + _FILE_MATRICES)
            _write(
                source / f"{number:05d}.safetensors",
                {f"layers.{each}.weight": (4096, 2048) for each in matrices},
                seed=number,
            )
        rules = path / "rules.yml"
        rules.write_text(json.dumps({"version": 1, "rules": [_RULE]}))

        def copy() -> None:
            for file in sorted(source.iterdir()):
                copied = target / file.name
                shutil.copyfile(file, copied)
                with copied.open("rb") as opened:
                    os.fsync(opened.fileno())

        def converted(name: str, to: Any) -> None:
            convert.convert(
                convert.Job(
                    source=str(source),
                    target=str(target / name),
                    rules=str(rules),
                    to=to,
                )
            )

        def remove() -> None:
            shutil.rmtree(target)
            target.mkdir()
            os.sync()

        sides = {
            "copy": copy,
            "convert_ratio_cp": lambda: converted("0", "orbax"),
            "convert_ratio_cp_safetensors": lambda: converted("model", "safetensors"),
        }
        secs = turns.timed(sides, _ROUNDS, after=remove)
    copies = secs.pop("copy")
    return {
        side: report.ratio(copies, taken, "a durable copy of the same bytes, at least")
        for side, taken in secs.items()
    }


def _write(
    path: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], *, seed: int
) -> None:
    # Random float32 tensors, in order.
    header = {}
    stop = 0
    for name, shape in shapes.items():
        start, stop = stop, stop + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write(generator.random(shape, np.float32).data)
