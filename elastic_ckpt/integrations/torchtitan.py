"""A data loader for torchtitan, whose number of ranks may change at a resume.

torchtitan's own loaders save the state of each data-parallel rank under its number, and
refuse another number of ranks. This one saves it by logical shard. Register a model
that is trained with it:

    spec = get_train_spec("llama3")
    spec = dataclasses.replace(spec, build_dataloader_fn=torchtitan.build_dataloader)
    register_train_spec("llama3_elastic", spec)

This is for torchtitan 0.2, the newest one that trains with PyTorch 2.13.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import distributed
from torchdata import stateful_dataloader
from torchtitan.components import dataloader, loss

from elastic_ckpt.core import errors
from elastic_ckpt.data import elastic_data, local_batches, sharded_state, torch_dataset
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.training import load

# Makes the data from torchtitan's tokenizer and the length of a sequence.
MakeData = Callable[[Any, int], elastic_data.ElasticData]


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: Any,
    job_config: Any,
    *,
    data: MakeData | None = None,
    **more: Any,
) -> ElasticDataLoader:
    """The loader of a run, as `build_dataloader_fn` of a `TrainSpec`.

    `[training] dataset_path` is the path of a configuration, as for `ec.load_config`,
    whose `max_target_length` is replaced by `seq_len`. `[training.dataloader]` is that
    of torchtitan's own loaders.

    Args:
      dp_world_size: the number of data-parallel ranks.
      dp_rank: the number of this one.
      tokenizer: torchtitan's, for `data`.
      job_config: torchtitan's configuration.
      data: makes the data from the tokenizer and `seq_len`, instead of `dataset_path`;
        bind it by `functools.partial`.
      **more: further options of `StatefulDataLoader`, bound in the same way, such as
        `multiprocessing_context="forkserver"` for workers that read ArrayRecord files.

    Raises:
      ConfigError: if neither `dataset_path` nor `data` is set.
    """
    training = job_config.training
    if data is not None:
        made = data(tokenizer, training.seq_len)
    elif training.dataset_path:
        made = pipeline.from_config(
            load.load(training.dataset_path).data, max_target_length=training.seq_len
        )
    else:
        raise errors.ConfigError(
            "build_dataloader: neither [training] dataset_path nor data is set; set"
            " dataset_path to a configuration with keys of ec.data.from_config"
        )
    options = dataclasses.asdict(training.dataloader)
    if not options["num_workers"]:
        # torchdata refuses them without workers.
        options |= {"persistent_workers": False, "prefetch_factor": None}
    return ElasticDataLoader(
        made,
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        seq_len=training.seq_len,
        local_batch_size=training.local_batch_size,
        **(options | more),
    )


class ElasticDataLoader(dataloader.BaseDataLoader):
    """Feeds torchtitan rows that are the same on any number of data-parallel ranks.

    A batch is `({"input": int64 [b, L]}, labels)`, labels int64 `[b, L]` with
    torchtitan's `IGNORE_INDEX` for padding.

    Args:
      data: data with the features `inputs` and `targets`, int32 `[L]`, and optionally
        `targets_segmentation`, which is 0 for padding.
      dp_world_size: the number of data-parallel ranks.
      dp_rank: the number of this one.
      seq_len: tokens of a row, L.
      local_batch_size: rows of a batch on this rank, b.
      **options: of torchdata's `StatefulDataLoader`, such as `num_workers`.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **options: Any,
    ) -> None:
        self._seq_len = seq_len
        batches = local_batches.LocalBatches(
            data,
            rank=dp_rank,
            num_ranks=dp_world_size,
            global_batch_size=local_batch_size * dp_world_size,
            agree=_agree_on(data.end),
        )
        dataset = torch_dataset.TorchDataset(batches)
        self._loader = stateful_dataloader.StatefulDataLoader(
            dataset, batch_size=None, collate_fn=_converted, **options
        )
        self._state = sharded_state.ShardedState(dataset)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for features, labels in self._loader:
            if labels.shape[1] != self._seq_len:
                raise errors.ConfigError(
                    f"ElasticDataLoader: rows have {labels.shape[1]} tokens, and"
                    f" seq_len is {self._seq_len}; make rows of that length"
                )
            yield features, labels

    def state_dict(self) -> dict[str, Any]:
        """The state by logical shard; see `ec.data.ShardedState`."""
        return dict(self._state.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Moves to a state that any number of ranks saved; an empty one is ignored."""
        if state_dict:
            self._state.load_state_dict(state_dict)


def _converted(row: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    missing = [name for name in ("inputs", "targets") if name not in row]
    if missing:
        raise errors.DataError(
            f"a batch has the features {sorted(row)}, without {missing}; yield inputs"
            " and targets, int32 [tokens], as ec.data.lm.packed does"
        )
    labels = _int64(row["targets"])
    if "targets_segmentation" in row:
        labels[_int64(row["targets_segmentation"]) == 0] = loss.IGNORE_INDEX
    return {"input": _int64(row["inputs"])}, labels


def _int64(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).to(torch.int64)


def _agree_on(end: elastic_data.End) -> Callable[[bool], bool]:
    # Data that is padded goes on while any rank has a row, other data while all have.
    padded = end is elastic_data.End.PADDED

    def agree(goes_on: bool) -> bool:
        if not distributed.is_initialized():
            return goes_on
        answers: list[bool] = [False] * distributed.get_world_size()
        distributed.all_gather_object(answers, goes_on)
        return any(answers) if padded else all(answers)

    return agree
