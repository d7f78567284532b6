"""Loads through a layout, beside stock loads by Orbax.

The state is a decoder's layers in float32, one tensor for each matrix of a layer, as
`[out, in]`. The target has all layers stacked and every matrix transposed, `[layer, in,
out]`. Orbax loads that target from a checkpoint that it wrote of the same arrays; ours
makes it of the layers that Orbax wrote. Both also load the safetensors as they are.

Every leaf is sharded over two CPU devices of one process. All files are in the page
cache, sides take turns, and a ratio is that of two turns of a round.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from benchmarks import report, turns, universal_convert
from elastic_ckpt import universal
from elastic_ckpt.universal.rules.layout import Layout

_DEVICES = 2
_MATRIX, _NORM = "layers.{layer}.{name}.weight", "layers.{layer}.norm"
_UNCHANGED = {_MATRIX: {_MATRIX: "out in"}, _NORM: {_NORM: "embed"}}
_STACKED = {
    _MATRIX: {"layers/{name}/kernel": "layer in out"},
    _NORM: {"layers/norm": "layer embed"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the state, and how often it is loaded."""

    layers: int = 26  # of 10 matrices of `embed` x `embed` elements altogether
    embed: int = 2048
    hidden: int = 4096  # within the perceptron of a layer
    rounds: int = 3

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The shapes of the matrices of a layer."""
        square = dict.fromkeys(("query", "key", "value", "out"), (self.embed,) * 2)
        up = dict.fromkeys(("gate", "up"), (self.hidden, self.embed))
        return {**square, **up, "down": (self.embed, self.hidden)}

    @property
    def num_bytes(self) -> int:
        """The size of the state."""
        elements = sum(map(math.prod, self.layer(0).values()))
        return 4 * self.layers * elements

    def layer(self, number: int) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the tensors of a layer."""
        matrices = {
            f"layers.{number}.{name}.weight": shape
            for name, shape in self.matrices.items()
        }
        return {f"layers.{number}.norm": (self.embed,), **matrices}


SMALL = Size(layers=2, embed=64, hidden=128, rounds=1)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite's part on loads."""
    return turns.in_new_process(_measured, size)


def _measured(size: Size) -> dict[str, report.Figure]:
    # In a process that has not used devices.
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={_DEVICES}"
    jax.config.update("jax_platforms", "cpu")
    with tempfile.TemporaryDirectory() as directory:
        raw, layers, stacked = (
            pathlib.Path(directory, name) for name in ("raw", "layers", "stacked")
        )
        raw.mkdir()
        for number in range(size.layers):
            file = raw / f"{number:05d}.safetensors"
            universal_convert.write(file, size.layer(number), seed=number)
        ocp.save(str(layers), _unchanged(raw, size, 1))
        ocp.save(str(stacked), _relayout(raw, size))
        context = ocp.Context()
        context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS

        def by_orbax() -> Any:
            with context:
                return ocp.load(str(raw), _layers(size, 0))

        sides = {
            "ours": lambda: _unchanged(raw, size, 0),
            "orbax": by_orbax,
            "plain": lambda: ocp.load(str(stacked), _stacked(size)),
            "plain_layers": lambda: ocp.load(str(layers), _layers(size, 1)),
            "relayout": lambda: _relayout(layers, size),
        }
        # Those of one structure are the same values.
        loaded = {name: sides[name]() for name in ("plain", "relayout")}
        assert jax.tree.all(jax.tree.map(_is_same, *loaded.values()))
        del loaded
        secs = turns.timed(
            {
                name: lambda load=load: jax.block_until_ready(load())
                for name, load in sides.items()
            },
            size.rounds,
            num_bytes=size.num_bytes,
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


def _is_same(a: jax.Array, b: jax.Array) -> bool:
    return bool((a == b).all())


def _unchanged(path: pathlib.Path, size: Size, dim: int) -> Any:
    return universal.load(path, _layers(size, dim), layout=_layout(_UNCHANGED))


def _relayout(path: pathlib.Path, size: Size) -> Any:
    return universal.load(path, _stacked(size), layout=_layout(_STACKED))


def _layout(targets: Mapping[str, Mapping[str, str]]) -> Layout:
    dims = {_MATRIX: "out in", _NORM: "embed"}
    rules = [
        {"from": {name: dims[name]}, "to": target} for name, target in targets.items()
    ]
    return Layout.parse(json.dumps({"version": 1, "rules": rules}), file="layout.yml")


def _layers(size: Size, dim: int) -> Any:
    # Every matrix is sharded along `dim`.
    return {
        name: _leaf(shape, dim if len(shape) > 1 else 0)
        for layer in range(size.layers)
        for name, shape in size.layer(layer).items()
    }


def _stacked(size: Size) -> Any:
    shapes = {
        name: (size.layers, *reversed(shape)) for name, shape in size.matrices.items()
    }
    norm = _leaf((size.layers, size.embed), 1)
    kernels = {name: {"kernel": _leaf(shape, 1)} for name, shape in shapes.items()}
    return {"layers": {**kernels, "norm": norm}}


def _leaf(shape: tuple[int, ...], dim: int) -> jax.ShapeDtypeStruct:
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    spec = PartitionSpec(*(None,) * dim, "data")
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)
