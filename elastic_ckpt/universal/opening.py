"""Opens a checkpoint in any supported format, which its file names identify.

    checkpoint = opening.open_checkpoint("gs://bucket/Qwen3-0.6B")
    checkpoint.format       # "safetensors"
    checkpoint.tensors      # where each tensor's bytes are

To add a format, write a module in `formats` with `is_format` and `open_checkpoint`, and
list it here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from etils import epath

from elastic_ckpt.core import bucket_clients, errors
from elastic_ckpt.universal.formats import (
    dcp,
    deepspeed,
    files,
    megatron,
    orbax,
    peft,
    weights,
)
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, collector_paused
from elastic_ckpt.universal.formats.files import FormatError


def _open_adapter(path: epath.PathLike) -> Checkpoint:
    adapter = open_checkpoint(peft.weights(path))
    return peft.joined(path, adapter, open_checkpoint(peft.base(path)))


# A function that returns whether file names match a format, and the format's opener.
# The first match is used.
_Format = tuple[Callable[[Collection[str]], bool], Callable[[epath.Path], Checkpoint]]
_OF_FILES: tuple[_Format, ...] = (
    (dcp.is_format, dcp.open_checkpoint),
    (weights.SAFETENSORS.is_format, weights.SAFETENSORS.open_checkpoint),
    (weights.PYTORCH.is_format, weights.PYTORCH.open_checkpoint),
)
_OF_DIRECTORIES: tuple[_Format, ...] = (
    (peft.is_format, _open_adapter),
    (megatron.is_format, megatron.open_checkpoint),
    _OF_FILES[0],
    (orbax.is_format, orbax.open_checkpoint),
    _OF_FILES[1],
    (deepspeed.is_format, deepspeed.open_checkpoint),
    _OF_FILES[2],
)
_LOOKED_FOR = (
    "adapter_config.json (PEFT); common.pt, mp_rank_*/, latest_checkpointed_iteration"
    ".txt (Megatron); .metadata (PyTorch's distributed checkpoints); _METADATA,"
    " _CHECKPOINT_METADATA (Orbax); *.safetensors, *.safetensors.index.json; zero/*/"
    "fp32.pt, *_model_states.pt, latest_universal, latest (DeepSpeed);"
    " pytorch_model.bin, *.bin.index.json, *.pt, *.pth (PyTorch)"
)


def open_checkpoint(path: epath.PathLike) -> Checkpoint:
    """Opens another framework's checkpoint to inspect it, without reading values.

        checkpoint = ec.universal.open_checkpoint("gs://bucket/Qwen3-0.6B")
        checkpoint.format  # "safetensors"
        [tensor.name for tensor in checkpoint.tensors]

    Args:
      path: a directory or a single-file checkpoint, local or in a bucket; or the ID of
        a model in the local Hugging Face cache, `hf://org/name` or
        `hf://org/name@revision`. A PEFT adapter is opened together with its base model.

    Returns:
      The checkpoint. It has a `format`, `tensors`, and `values` by path, such as the
      numbers in a `config.json`.

    Raises:
      FormatError: if there is no checkpoint, or the checkpoint is damaged, malicious,
        or not in a supported format.
      ConfigError: if the bucket's client is not installed.
    """
    path = files.resolved(path)
    bucket_clients.prepare(str(path))
    source = epath.Path(path)
    try:
        if source.is_dir():
            names, formats = sorted(e.name for e in source.iterdir()), _OF_DIRECTORIES
        elif source.exists():
            names, formats = [source.name], _OF_FILES
        else:
            raise FormatError(f"{path} does not exist; pass a checkpoint path")
        for is_format, open_format in formats:
            if is_format(names):
                with collector_paused():
                    return open_format(source)
    except bucket_clients.failures() as error:
        errors.check_open_files(error)
        raise FormatError(
            f"{path} cannot be read ({error}); check the path and your access to it"
        ) from error
    raise FormatError(
        f"{path} does not contain a checkpoint in a supported format. It contains"
        f" {errors.first_of(names) or 'no files'}; expected one of {_LOOKED_FOR}"
    )
