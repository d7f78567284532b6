"""A data loader for torchtitan that can resume on a different number of ranks.

torchtitan's own loaders save each data-parallel rank's state under the rank's number
and reject a different number of ranks. This loader saves its state by logical shard.
Copy this file next to the program that starts torchtitan and register a model there:

    spec = get_train_spec("llama3")
    spec = dataclasses.replace(spec, build_dataloader_fn=build_dataloader)
    register_train_spec("llama3_elastic", spec)

This loader is for torchtitan 0.2, the newest version that trains with PyTorch 2.13.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

import elastic_ckpt as ec

# Creates the data from torchtitan's tokenizer and the sequence length.
MakeData = Callable[[Any, int], ec.data.ElasticData]


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: Any,
    job_config: Any,
    *,
    data: MakeData | None = None,
    **more: Any,
) -> ElasticDataLoader:
    """The data loader of a run, for `build_dataloader_fn` of a `TrainSpec`.

    `[training] dataset_path` is the path of a configuration for `ec.load_config`;
    `seq_len` replaces its `max_target_length`. `[training.dataloader]` works as with
    torchtitan's own loaders.

    Args:
      dp_world_size: the number of data-parallel ranks.
      dp_rank: the number of this rank.
      tokenizer: torchtitan's tokenizer, for `data`.
      job_config: torchtitan's configuration.
      data: creates the data from the tokenizer and `seq_len`, instead of
        `dataset_path`; bind it with `functools.partial`.
      **more: further options of `ec.data.TorchLoader`, bound in the same way, such as
        `multiprocessing_context="forkserver"` for workers that read ArrayRecord files.
    """
    training = job_config.training
    if data is not None:
        made = data(tokenizer, training.seq_len)
    else:
        section = ec.load_config(training.dataset_path).data
        made = ec.data.from_config(section, max_target_length=training.seq_len)
    options = dataclasses.asdict(training.dataloader)
    if not options["num_workers"]:
        # torchdata rejects them without workers.
        options |= {"persistent_workers": False, "prefetch_factor": None}
    return ElasticDataLoader(
        made,
        rank=dp_rank,
        num_ranks=dp_world_size,
        local_batch_size=training.local_batch_size,
        **(options | more),
    )


class ElasticDataLoader(BaseDataLoader):
    """Feeds torchtitan the same rows on any number of data-parallel ranks.

    A batch is `({"input": int64 [b, L]}, labels)`, labels int64 `[b, L]` with
    torchtitan's `IGNORE_INDEX` for padding.

    Args:
      data: data with the features `inputs` and `targets`, int32 `[L]`, and optionally
        `targets_segmentation`, which is 0 for padding.
      rank: the number of this data-parallel rank.
      num_ranks: the number of data-parallel ranks.
      local_batch_size: the number of rows per batch on this rank, b.
      **options: options of `ec.data.TorchLoader`, such as `num_workers`.
    """

    def __init__(
        self,
        data: ec.data.ElasticData,
        *,
        rank: int,
        num_ranks: int,
        local_batch_size: int,
        **options: Any,
    ) -> None:
        batches = ec.data.LocalBatches(
            data,
            rank=rank,
            num_ranks=num_ranks,
            global_batch_size=local_batch_size * num_ranks,
            agree=functools.partial(_agree, data.end),
        )
        self._loader = ec.data.TorchLoader(batches, collate_fn=_converted, **options)
        self._state = ec.data.ShardedState(self._loader)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """The state by logical shard; see `ec.data.ShardedState`."""
        return dict(self._state.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state saved by any number of ranks; ignores an empty state."""
        if state_dict:
            self._state.load_state_dict(state_dict)


def _converted(row: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    labels = _int64(row["targets"])
    if "targets_segmentation" in row:
        labels[_int64(row["targets_segmentation"]) == 0] = IGNORE_INDEX
    return {"input": _int64(row["inputs"])}, labels


def _int64(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).to(torch.int64)


def _agree(end: ec.data.End, goes_on: bool) -> bool:
    # Padded data continues while any rank has a row, other data while all ranks do.
    if not distributed.is_initialized():
        return goes_on
    answers: list[bool] = [False] * distributed.get_world_size()
    distributed.all_gather_object(answers, goes_on)
    return any(answers) if end is ec.data.End.PADDED else all(answers)
