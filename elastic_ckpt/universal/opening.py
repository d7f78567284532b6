"""Opens a checkpoint of any format that is read; its files show which it is.

    checkpoint = opening.open_checkpoint("gs://bucket/Qwen3-0.6B")
    checkpoint.format       # "safetensors"
    checkpoint.tensors      # where the bytes of each tensor lie

To add a format, write a module in `formats` with `is_format` and `open_checkpoint`, and
list it here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from etils import epath

from elastic_ckpt.core import bucket_clients, errors
from elastic_ckpt.universal import garbage_collection
from elastic_ckpt.universal.formats import (
    dcp,
    deepspeed,
    deepspeed_universal,
    hugging_face,
    megatron,
    orbax_checkpoint,
    peft_adapter,
    safetensors_checkpoint,
    torch_weights,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.stored import Checkpoint


@dataclasses.dataclass(frozen=True)
class _Format:
    # The files that it has, for people.
    files: str
    # Whether files of these names, which one directory has, are of this format.
    is_format: Callable[[Collection[str]], bool]
    open_checkpoint: Callable[[epath.PathLike], Checkpoint]
    # Whether a single file is a checkpoint, or leads to one.
    has_file: bool = False


def _open_adapter(path: epath.PathLike) -> Checkpoint:
    adapter = open_checkpoint(peft_adapter.weights(path))
    return peft_adapter.joined(path, adapter, open_checkpoint(peft_adapter.base(path)))


# A directory is of the first that fits.
_FORMATS = (
    _Format("PEFT (adapter_config.json)", peft_adapter.is_format, _open_adapter),
    _Format(
        "Megatron (common.pt, mp_rank_*/, latest_checkpointed_iteration.txt)",
        megatron.is_format,
        megatron.open_checkpoint,
    ),
    _Format(
        "PyTorch distributed checkpoints (.metadata)",
        dcp.is_format,
        dcp.open_checkpoint,
        has_file=True,
    ),
    _Format(
        "Orbax (_METADATA, _CHECKPOINT_METADATA)",
        orbax_checkpoint.is_format,
        orbax_checkpoint.open_checkpoint,
    ),
    _Format(
        "safetensors (*.safetensors, *.safetensors.index.json)",
        safetensors_checkpoint.is_format,
        safetensors_checkpoint.open_checkpoint,
        has_file=True,
    ),
    _Format(
        "DeepSpeed universal (zero/*/fp32.pt, latest_universal)",
        deepspeed_universal.is_format,
        deepspeed_universal.open_checkpoint,
    ),
    _Format(
        "DeepSpeed (*_model_states.pt, latest)",
        deepspeed.is_format,
        deepspeed.open_checkpoint,
    ),
    _Format(
        "PyTorch (pytorch_model.bin, *.bin.index.json, *.pt, *.pth)",
        torch_weights.is_format,
        torch_weights.open_checkpoint,
        has_file=True,
    ),
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
    path = resolved(path)
    bucket_clients.prepare(str(path))
    source = epath.Path(path)
    try:
        is_file = False
        if source.is_dir():
            names = sorted(each.name for each in source.iterdir())
        elif source.exists():
            names, is_file = [source.name], True
        else:
            raise FormatError(f"{path} does not exist; give the path of a checkpoint")
        for each in _FORMATS:
            if each.is_format(names) and (each.has_file or not is_file):
                with garbage_collection.paused():
                    checkpoint = each.open_checkpoint(source)
                _check_names(checkpoint, path)
                return checkpoint
    except bucket_clients.failures() as error:
        raise FormatError(f"{path} cannot be read ({error})") from error
    raise FormatError(
        f"{path} has no files of a format that is read. It has"
        f" {errors.first_of(names) or 'no files'}; looked for were"
        f" {'; '.join(each.files for each in _FORMATS)}"
    )


def resolved(path: epath.PathLike) -> epath.PathLike:
    """The path; that in the hub's cache, if it is the id of a model.

    Raises:
      FormatError: if the cache does not have the model.
    """
    is_id = hugging_face.is_id(str(path))
    return hugging_face.snapshot(str(path)) if is_id else path


def _check_names(checkpoint: Checkpoint, path: epath.PathLike) -> None:
    # Half of a pair of UTF-16 can be in a text, and cannot be printed or written.
    for tensor in checkpoint.tensors:
        if not tensor.name.isascii():
            try:
                tensor.name.encode()
            except UnicodeEncodeError:
                raise FormatError(
                    f"{path} has a tensor of the name {tensor.name[:60]!a}, which is no"
                    " valid Unicode; rename it where the checkpoint was written"
                ) from None
