"""Opens DeepSpeed's universal checkpoints: a directory of files for each parameter.

`zero/<parameter>/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt` and `step.pt` hold the whole
parameter, for any number of ranks. Tensors have the names and kinds that `deepspeed`
gives them, and no ranks. The weights of the model in other types are left out.

Files of the model beside them have the shapes of parameters, which files from ZeRO-3
lack, and `values["universal_checkpoint_info"]`. Facts about one parameter, such as the
dim along which its parts were joined, are in `values` under `parameters/`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection

from etils import epath

from elastic_ckpt.universal.formats import (
    coverage,
    deepspeed,
    optimizer_states,
    plain_values,
    state_kinds,
    torch_file,
    zero,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.optimizer_states import Shape
from elastic_ckpt.universal.formats.torch_file import Tensor
from elastic_ckpt.universal.stored import StoredTensor

LATEST = "latest_universal"
_FOLDER = "zero"
_SUFFIX = ".pt"
_MODEL = re.compile(r"(?:zero_pp_rank_0+_)?mp_rank_\d+_model_states\.pt")


def is_format(names: Collection[str]) -> bool:
    """Whether a directory of these names holds such a checkpoint, or leads to one."""
    if LATEST in names:
        return deepspeed.LATEST not in names
    return _FOLDER in names and deepspeed.is_format(names)


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens the directory of a step, or one whose file `latest_universal` names it.

    Raises:
      FormatError: if a file is damaged, or holds something else than its parameter.
    """
    folder = deepspeed.folder_of(path, LATEST)
    if not (folder / _FOLDER).exists():
        raise FormatError(f"{folder} has no directory {_FOLDER}")
    found = {
        each: each for each in sorted(folder.iterdir()) if _MODEL.fullmatch(each.name)
    }
    models = list(torch_file.read_all(found).values())
    values = deepspeed.model_values(models[0]) if models else {}
    shapes: dict[str, Shape] = {}
    for model in models:
        if model.at("param_shapes") is not None:
            for group in zero.shapes_of(model):
                shapes |= group
    # By parameter and state.
    paths = {
        (parameter.name, file.name.removesuffix(_SUFFIX)): file
        for parameter in (folder / _FOLDER).iterdir()
        if not parameter.name.endswith(_SUFFIX)
        for file in parameter.iterdir()
        if file.name.endswith(_SUFFIX)
    }
    tensors = []
    for (name, key), file in sorted(torch_file.read_all(paths).items()):
        held = file.value if isinstance(file.value, dict) else {"param": file.value}
        tensor = held.get("param")
        if isinstance(tensor, Tensor):
            tensors.append(_stored((name, key), tensor, shapes.get(name)))
        elif not isinstance(tensor, int | float):
            raise file.error("holds neither a tensor nor a number")
        stated = held if held is file.value else {key: file.value}
        if key in ("fp32", "step"):
            flat = plain_values.flatten(stated)
            values |= {f"parameters/{name}/{at}": value for at, value in flat.items()}
    if not tensors:
        raise FormatError(f"{folder / _FOLDER} has no directories of parameters")
    return OpenedCheckpoint(
        format="DeepSpeed universal",
        tensors=tensors,
        values=values,
        checksums=torch_file.checksums,
    )


def _stored(key: tuple[str, str], tensor: Tensor, shape: Shape | None) -> StoredTensor:
    name, state = key
    made = optimizer_states.stored(name, state_kinds.kind_of(state), tensor)
    width = tensor.dtype.itemsize
    is_flat = len(tensor.shape) == 1 and tensor.byte_strides == (width,)
    if shape is None or not is_flat or tensor.shape != (math.prod(shape),):
        return made
    box, offset = coverage.whole(shape), tensor.file_offset
    fragments = coverage.contiguous(box, width, file=tensor.path, offset=offset)
    return dataclasses.replace(made, shape=shape, fragments=fragments)
