"""The files of a DeepSpeed checkpoint, and the ranks that wrote them.

DeepSpeed numbers the ranks of a model (`mp_rank_XX`) through stages and tensor-parallel
ranks, the latter first. Each of them has one file of the model, and one of optimizer
states for each data-parallel rank (`zero_pp_rank_DD`).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import (
    plain_values,
    source_files,
    torch_file,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.torch_file import TorchFile

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?:(?:bf16|fp16)_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"
)
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
LATEST = "latest"
INFO = "universal_checkpoint_info"
# In the file of a model: tensors, and what describes them.
_STRUCTURE = (
    *("module", "optimizer", "param_shapes", "buffer_names", INFO),
    *("frozen_param_shapes", "frozen_param_fragments"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Files:
    """The files of one checkpoint, read.

    Attributes:
      folder: that holds them.
      tp: the number of tensor-parallel ranks.
      pp: the number of stages.
      dp: the number of files of optimizer states that a rank of the model has.
      models: by rank of the model; the first data-parallel rank's, if all have one.
      shards: by rank of the model and data-parallel rank, files of ZeRO-3's models.
      optimizers: by rank of the model and data-parallel rank.
      layers: by layer of a pipeline and tensor-parallel rank.
      experts: by layer, expert and rank of the model, ordered.
      expert_optimizers: by expert-parallel rank and rank of the model, without ZeRO.
    """

    folder: epath.Path
    tp: int
    pp: int
    dp: int
    models: dict[int, TorchFile]
    shards: dict[tuple[int, int], TorchFile]
    optimizers: dict[tuple[int, int], TorchFile]
    layers: dict[tuple[int, int], TorchFile]
    experts: dict[tuple[int, int, int], TorchFile]
    expert_optimizers: dict[tuple[int, int], TorchFile]

    def coordinates(self, rank: int) -> tuple[int, int]:
        """The tensor-parallel rank and the stage of a rank of the model."""
        return rank % self.tp, rank // self.tp


def is_format(names: Collection[str]) -> bool:
    """Whether a directory of these names holds such files, or leads to them."""
    return LATEST in names or any(
        pattern.fullmatch(name) for pattern in (_MODEL, _LAYER) for name in names
    )


def folder_of(path: epath.PathLike, latest: str = LATEST) -> epath.Path:
    """The directory of files: `path`, or that which its file `latest` names.

    Raises:
      FormatError: if it names none.
    """
    folder = epath.Path(path)
    pointer = folder / latest
    if not pointer.exists():
        return folder
    content = source_files.read(pointer, most_bytes=source_files.MOST_NAME_BYTES)
    tag = content.decode("utf-8", "replace").strip()
    if not source_files.is_plain_name(tag):
        raise FormatError(f"{pointer} names {tag!r}, which is no directory beside it")
    if not (folder / tag).exists():
        raise FormatError(f"{pointer} names {tag}, which {folder} does not have")
    return folder / tag


def model_values(model: TorchFile) -> dict[str, Any]:
    """The numbers and texts in the file of a model, see `Checkpoint.values`."""
    values = model.values(without=_STRUCTURE)
    info = model.at(INFO)
    if isinstance(info, dict):
        values[INFO] = plain_values.plain(info)
    return values


def read(folder: epath.Path) -> Files:
    """Reads the structure of all files in `folder`.

    Raises:
      FormatError: if one is damaged or missing, or of a kind that is not read.
    """
    paths = {each.name: each for each in folder.iterdir()}
    budget = SourceBudget()
    first = torch_file.read_all(_matching(paths, _MODEL), budget)
    models = {rank: file for (dp, rank), file in first.items() if dp in (-1, 0)}
    if not models:
        raise FormatError(f"{folder} has no files mp_rank_*_model_states.pt")
    layers = torch_file.read_all(_matching(paths, _LAYER, default=0), budget)
    optimizers = torch_file.read_all(_matching(paths, _OPTIMIZER), budget)
    experts = dict(sorted(_matching(paths, _EXPERT).items()))
    expert_optimizers = _matching(paths, _EXPERT_OPTIMIZER)
    tp, pp = _degrees(models, layers)
    files = Files(
        folder=folder,
        tp=tp,
        pp=pp,
        dp=_data_parallel(models[min(models)], [dp for dp, _ in optimizers]),
        models=models,
        shards={(rank, dp): file for (dp, rank), file in first.items() if dp >= 0},
        optimizers={(rank, dp): file for (dp, rank), file in optimizers.items()},
        layers=layers,
        experts=torch_file.read_all(experts, budget),
        expert_optimizers=torch_file.read_all(expert_optimizers, budget),
    )
    _check_ranks(files)
    _check_experts(files)
    return files


def _matching(
    paths: dict[str, epath.Path], pattern: re.Pattern[str], default: int = -1
) -> dict[tuple[int, ...], epath.Path]:
    matching: dict[tuple[int, ...], epath.Path] = {}
    for name in sorted(paths):
        if match := pattern.fullmatch(name):
            groups = tuple(
                default if part is None else int(part[:9]) for part in match.groups()
            )
            if groups in matching:
                raise FormatError(
                    f"{paths[name]} and {matching[groups].name} are of the same rank;"
                    " remove that of another save"
                )
            matching[groups] = paths[name]
    return matching


def _degrees(
    models: dict[int, TorchFile], layers: Iterable[tuple[int, ...]]
) -> tuple[int, int]:
    # The numbers of tensor-parallel ranks and stages.
    file = models[min(models)]
    stated = file.at("checkpoint_parallel_dimensions")
    ranks = {tp for _, tp in layers}
    tp = 1 + max(ranks) if ranks else len(models)
    pp = len(models) // tp
    if isinstance(stated, dict):
        tp, pp = (stated.get(f"{axis}_degree") for axis in ("tp", "pp"))
    if type(tp) is not int or type(pp) is not int or not 0 < tp * pp == len(models):
        raise file.error(
            f"states {str(tp)[:9]} tensor-parallel ranks and {str(pp)[:9]} stages,"
            f" and there are files of {len(models)} ranks of the model"
        )
    return tp, pp


def _data_parallel(file: TorchFile, ranks: list[int]) -> int:
    stated = file.at("dp_world_size")
    count = stated if type(stated) is int and ranks else 1
    return max([count, *(rank + 1 for rank in ranks)])


def _check_ranks(files: Files) -> None:
    missing = list(itertools.islice(_missing(files), errors.MOST_NAMED + 1))
    if missing:
        raise FormatError(
            f"{files.folder} lacks the files of {errors.first_of(missing)}; copy them"
            " from the machines that saved them"
        )


def _check_experts(files: Files) -> None:
    # By layer and expert of a stage: its tensor-parallel ranks.
    ranks: dict[tuple[int, int, int], set[int]] = {}
    for layer, expert, rank in files.experts:
        tp, stage = files.coordinates(rank)
        ranks.setdefault((layer, expert, stage), set()).add(tp)
    for (layer, expert, _), held in ranks.items():
        if len(held) != files.tp:
            raise FormatError(
                f"{files.folder} has the expert {expert} of layer {layer} in files of"
                f" {len(held)} of {files.tp} tensor-parallel ranks: files are missing,"
                " or ranks have different experts, which are not read; save with"
                " enable_expert_tensor_parallelism"
            )


def _missing(files: Files) -> Iterator[str]:
    for rank in range(files.tp * files.pp):
        if rank not in files.models:
            yield f"mp_rank_{rank:02d}"
        for held in filter(None, (files.optimizers, files.shards)):
            for dp in range(files.dp):
                if (rank, dp) not in held:
                    yield f"zero_pp_rank_{dp}_mp_rank_{rank:02d}"
