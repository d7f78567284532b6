"""Opens DeepSpeed's universal checkpoints: a directory of files for each parameter.

`zero/<parameter>/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt` and `step.pt` hold the whole
parameter, for any number of ranks. Tensors have the names and kinds that `deepspeed`
gives them, and no ranks. The weights of the model in other types are left out.

Files of the model beside them have the shapes of parameters, which files from ZeRO-3
lack, and `values["universal_checkpoint_info"]`. Facts about one parameter, such as the
dim along which its parts were joined, are in `values` under `parameters/`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import Any

from etils import epath

from elastic_ckpt.universal.formats import (
    coverage,
    deepspeed_files,
    plain_values,
    state_kinds,
    torch_file,
    zero_states,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import StoredTensor

LATEST = "latest_universal"
_FOLDER = "zero"
_SUFFIX = ".pt"
_MODEL = re.compile(r"(?:zero_pp_rank_0+_)?mp_rank_\d+_model_states\.pt")


def is_format(names: Collection[str]) -> bool:
    """Whether a directory of these names holds such a checkpoint, or leads to one."""
    if LATEST in names:
        return deepspeed_files.LATEST not in names
    return _FOLDER in names and deepspeed_files.is_format(names)


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens the directory of a step, or one whose file `latest_universal` names it.

    Raises:
      FormatError: if a file is damaged, or holds something else than its parameter.
    """
    folder = deepspeed_files.folder_of(path, LATEST)
    budget = SourceBudget()
    models = torch_file.read_all(
        {
            each.name: each
            for each in sorted(folder.iterdir())
            if _MODEL.fullmatch(each.name)
        },
        budget,
    )
    values: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for model in models.values():
        values = values or deepspeed_files.model_values(model)
        if model.at("param_shapes") is not None:
            for group in zero_states.shapes_of(model):
                shapes |= group
    tensors = []
    files = torch_file.read_all(_files(folder), budget)
    for (name, key), file in sorted(files.items()):
        tensor = file.at("param") if isinstance(file.value, dict) else file.value
        if isinstance(tensor, Tensor):
            tensors.append(_stored(file, (name, key), tensor, shapes.get(name)))
        elif not isinstance(tensor, int | float):
            raise file.error("holds neither a tensor nor a number")
        stated = file.value if isinstance(file.value, dict) else {key: file.value}
        if key in ("fp32", "step"):
            values |= {
                f"parameters/{name}/{path}": value
                for path, value in plain_values.flatten(
                    stated, file=file.path, budget=budget
                ).items()
            }
    if not tensors:
        raise FormatError(f"{folder / _FOLDER} has no directories of parameters")
    return OpenedCheckpoint(
        format="DeepSpeed universal",
        tensors=tensors,
        values=values,
        checksums=torch_file.checksums,
    )


def _files(folder: epath.Path) -> dict[tuple[str, str], epath.Path]:
    # By parameter and state.
    paths = {}
    if not (folder / _FOLDER).exists():
        raise FormatError(f"{folder} has no directory {_FOLDER}")
    for parameter in (folder / _FOLDER).iterdir():
        if not parameter.name.endswith(_SUFFIX):
            for path in parameter.iterdir():
                if path.name.endswith(_SUFFIX):
                    key = path.name.removesuffix(_SUFFIX)
                    paths[parameter.name, key] = path
    return paths


def _stored(
    file: TorchFile,
    key: tuple[str, str],
    tensor: Tensor,
    shape: tuple[int, ...] | None,
) -> StoredTensor:
    name, state = key
    fragments = file.fragment(tensor)
    is_flat = len(tensor.shape) == 1 and tensor.byte_strides == (tensor.dtype.itemsize,)
    if is_flat and shape is not None and math.prod(shape) == tensor.shape[0]:
        width, offset = tensor.dtype.itemsize, tensor.file_offset
        box = coverage.whole(shape)
        fragments = coverage.contiguous(box, width, file=file.path, offset=offset)
    else:
        shape = tensor.shape
    return StoredTensor(
        name=name,
        kind=state_kinds.kind_of(state),
        dtype=tensor.dtype,
        shape=shape,
        fragments=fragments,
    )
