"""Opens a checkpoint of any format that is read; its files show which it is.

    checkpoint = opening.open_checkpoint("gs://bucket/Qwen3-0.6B")
    checkpoint.format       # "safetensors"
    checkpoint.tensors      # where the bytes of each tensor lie

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


# Whether the names of a directory's files are of a format, and its opener. A directory
# is of the first that fits.
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
    """Opens a checkpoint of another program to look at it; no values are read.

        checkpoint = ec.universal.open_checkpoint("gs://bucket/Qwen3-0.6B")
        checkpoint.format  # "safetensors"
        [tensor.name for tensor in checkpoint.tensors]

    Args:
      path: a directory, or the file of a checkpoint of one file, local or in a bucket;
        or the id of a model in the local cache of the Hugging Face hub,
        `hf://org/name` or `hf://org/name@revision`. The directory of an adapter of PEFT
        leads to its base, too.

    Returns:
      The checkpoint, with its `format`, its `tensors`, and its `values`, such as the
      numbers of a `config.json`, by path.

    Raises:
      FormatError: if there is no checkpoint, or it is damaged, made to do harm, or in
        no format that can be read.
      ConfigError: if the client of the bucket is not installed.
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
            raise FormatError(f"{path} does not exist; give the path of a checkpoint")
        for is_format, open_format in formats:
            if is_format(names):
                with collector_paused():
                    return open_format(source)
    except bucket_clients.failures() as error:
        raise FormatError(f"{path} cannot be read ({error})") from error
    raise FormatError(
        f"{path} has no files of a format that is read. It has"
        f" {errors.first_of(names) or 'no files'}; looked for were {_LOOKED_FOR}"
    )
