"""The weights of the model in a DeepSpeed checkpoint, without those of optimizers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_ckpt.universal.formats import flat_parameters, torch_file, zero_states
from elastic_ckpt.universal.formats.deepspeed_files import Files
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import StoredTensor

# Begins names of parameters that layers share: a pipeline has one in each stage.
TIED = "tied_modules."


def weights(files: Files, rank: int) -> Iterator[StoredTensor]:
    """The weights that a rank of the model has; layers count as of the first stage.

    Raises:
      FormatError: if a file contradicts another, or itself.
    """
    file = files.models[rank]
    buffers = _buffers(file)
    for name, tensor in torch_file.tensors_of(file.at("module")):
        # ZeRO-3 leaves empty tensors in place of those that it divides.
        if not (files.shards and tensor.shape == (0,) and name not in buffers):
            yield _stored(file, name, tensor, buffers)
    if files.shards:
        yield from _frozen(files, rank)
    tp, stage = files.coordinates(rank)
    if stage == 0:
        yield from _of_layers(files, tp)
    for (_, _, mp), expert in files.experts.items():
        if mp == rank:
            for name, tensor in torch_file.tensors_of(expert.value):
                yield _stored(expert, name, tensor, frozenset())


def _buffers(file: TorchFile) -> frozenset[str]:
    names = file.at("buffer_names")
    listed = names if isinstance(names, list) else []
    return frozenset(name for name in listed if isinstance(name, str))


def _stored(
    file: TorchFile, name: str, tensor: Tensor, buffers: frozenset[str]
) -> StoredTensor:
    return StoredTensor(
        name=name,
        kind="buffer" if name in buffers else "parameter",
        dtype=tensor.dtype,
        shape=tensor.shape,
        fragments=file.fragment(tensor),
    )


def _frozen(files: Files, rank: int) -> Iterator[StoredTensor]:
    # Parameters that are not trained: no optimizer has them.
    shards = [files.shards[rank, dp] for dp in range(files.dp)]
    shapes = shards[0].at("frozen_param_shapes")
    if not isinstance(shapes, dict):
        return
    for name, shape in zero_states.named_shapes(shards[0], shapes).items():
        ranges = []
        for dp, file in enumerate(shards):
            flat = file.dict_at("frozen_param_fragments").get(name)
            if not isinstance(flat, Tensor):
                raise file.error(f"lacks its part of {name}")
            ranges.append(
                zero_states.equal_part(
                    *(file, flat), start=0, numel=math.prod(shape), part=(dp, files.dp)
                )
            )
        yield StoredTensor(
            name=name,
            dtype=ranges[0].flat.dtype,
            shape=shape,
            fragments=flat_parameters.fragments(shape, ranges, name),
        )


def _of_layers(files: Files, tp: int) -> Iterator[StoredTensor]:
    names: dict[str, Any] = {}
    buffers: frozenset[str] = frozenset()
    for rank, model in files.models.items():
        if files.coordinates(rank)[0] == tp:
            buffers |= _buffers(model)
            if model.at("param_shapes") is not None:
                for group in zero_states.shapes_of(model):
                    names |= group
    tied = {name: shape for name, shape in names.items() if name.startswith(TIED)}
    seen: set[str] = set()
    for (layer, layer_tp), file in sorted(files.layers.items()):
        if layer_tp != tp:
            continue
        for key, tensor in torch_file.tensors_of(file.value):
            name = f"{layer}.{key}"
            if name not in names and name not in buffers:
                name = _tied_name(tied, key, tensor.shape) or name
            # Each of the layers that share a parameter has it.
            if name not in seen:
                seen.add(name)
                yield _stored(file, name, tensor, buffers)


def _tied_name(
    tied: Mapping[str, tuple[int, ...]], key: str, shape: tuple[int, ...]
) -> str | None:
    names = [name for name in tied if name.endswith(f".{key}") and tied[name] == shape]
    return names[0] if len(names) == 1 else None
