"""Conversions to DeepSpeed's universal format: files for each parameter, common ones.

    <target>/global_step300/zero/1.mlp.weight/{fp32,exp_avg,exp_avg_sq,step}.pt
    <target>/global_step300/zero/optimizer_state.pt
    <target>/global_step300/mp_rank_00_model_states.pt
    <target>/latest_universal

Targets are named by kind and parameter: `master/1.mlp.weight`, `first_moment/...`,
`second_moment/...`, `step/...`, or the optimizer's name of another state. DeepSpeed
restores them with the option `load_universal_checkpoint`, at any parallelism, from the
float32 masters and moments. Learning rate, betas and other options are those of the run
that loads it; with a scheduler, `load_lr_scheduler_states=False` is required.

Memory: as other conversions, or for each thread the largest parameter.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from typing import Any

import numpy as np

from elastic_ckpt.core import boxes, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.deepspeed_layout import described_layout
from elastic_ckpt.universal.formats import deepspeed_universal, state_kinds
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.writing import torch_file
from elastic_ckpt.universal.writing.conversion import Conversion
from elastic_ckpt.universal.writing.files import File, Write
from elastic_ckpt.universal.writing.writer import Destination, Written

_MASTER, _STEP = "master", "step"
_MOMENTS = ("first_moment", "second_moment")
# Kinds that DeepSpeed does not restore from such checkpoints.
_OTHERS = ("parameter", "buffer")
# Places of the step in sources that have no tensor of it.
_STEP_VALUES = ("global_steps", "iteration")
_KEYS = {kind: key for key, kind in state_kinds.KINDS.items()}
# DeepSpeed takes as many groups as its optimizer has; empty ones change no option.
_MOST_GROUPS = 1024
# DeepSpeed refuses files without a version. They are like those of this one.
_DEEPSPEED = "0.19.8"


class DeepSpeedDestination(Destination):
    """See `Destination`.

    Raises:
      CheckpointError: if the directory is in a bucket, or a target is no state of an
        optimizer.
    """

    def __init__(self, conversion: Conversion) -> None:
        super().__init__(conversion)
        if not storage.is_local(self.target):
            raise errors.CheckpointError(
                f"{self.target} is not a local directory, from which DeepSpeed reads"
                " its checkpoints; convert to one, and copy it"
            )
        self._kinds: dict[str, set[str]] = {}
        for target in conversion.targets:
            kind, parameter = _parts(target)
            self._kinds.setdefault(parameter, set()).add(kind)
        lacking = [name for name, held in self._kinds.items() if _MASTER not in held]
        if lacking or not self._kinds:
            raise errors.CheckpointError(
                f"{len(lacking)} parameters have no {_MASTER}/<parameter>"
                f" ({errors.first_of(lacking)}), from which DeepSpeed restores weights;"
                " add them to the layout"
            )
        places = collections.Counter(
            self._name(*_parts(each)) for each in conversion.targets
        )
        (path, count), *_ = places.most_common(1)
        if count > 1:
            raise errors.CheckpointError(
                f"{count} targets have the file {path} of DeepSpeed; {_KEYS} are the"
                " names of its files by kind, rename or drop others"
            )
        self._step = self._step_of_source()
        self._tag = f"global_step{self._step}"
        self.files = [
            File(self._path(*_parts(target)), {target: [boxes.whole(target.shape)]})
            for target in conversion.targets
            if target.num_bytes
        ]
        # Names that a layout gives are not those of the source.
        is_named = conversion.job.rules is not None
        self._facts = {} if is_named else described_layout.facts(conversion.checkpoint)

    def writes(
        self, file: File, target: TargetTensor, box: Box, values: np.ndarray
    ) -> Iterable[Write]:
        """See `Destination`."""
        del file, box
        return torch_file.writes(self._value(target, values))

    def commit(self, attempt: str, contents: Written) -> None:
        """See `Destination`."""
        del contents
        directory = self.directory(attempt)
        for name, content in self._common_files():
            storage.write_atomic(directory / name, content)
        storage.rename(directory, self.target)

    def _value(self, target: TargetTensor, values: np.ndarray) -> Any:
        kind, parameter = _parts(target)
        # Steps are alone in their files.
        if kind == _STEP:
            return values
        return {**self._facts.get(parameter, {}), "param": values}

    def _common_files(self) -> Iterable[tuple[str, bytes]]:
        for target in self.conversion.targets:
            if not target.num_bytes:
                value = self._value(target, np.empty(target.shape, target.dtype))
                yield self._path(*_parts(target)), torch_file.content(value)
        step = np.array(self._step, np.float32)
        for parameter, kinds in self._kinds.items():
            if kinds.intersection(_MOMENTS) and _STEP not in kinds:
                yield self._path(_STEP, parameter), torch_file.content(step)
        groups: list[dict[str, Any]] = [{} for _ in range(_MOST_GROUPS)]
        optimizer = {
            "ds_version": _DEEPSPEED,
            "param_groups": groups,
            # ZeRO-3 has all here, and one step for all parameters.
            "optimizer_state_dict": {
                "state": {0: {_STEP: step}},
                "param_groups": groups[:1],
            },
        }
        path = f"{self._tag}/zero/optimizer_state.pt"
        yield path, torch_file.content(optimizer)
        model = {
            "module": None,
            "optimizer": None,
            "lr_scheduler": None,
            "buffer_names": [],
            "param_shapes": None,
            "skipped_steps": 0,
            "global_steps": self._step,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_version": _DEEPSPEED,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
        }
        # The second name is the one that ZeRO-3 reads.
        for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
            path = f"{self._tag}/{name}_model_states.pt"
            yield path, torch_file.content(model)
        yield deepspeed_universal.LATEST, self._tag.encode()

    def _path(self, kind: str, parameter: str) -> str:
        return f"{self._tag}/zero/{self._name(kind, parameter)}"

    def _name(self, kind: str, parameter: str) -> str:
        return f"{parameter}/{_KEYS.get(kind, kind)}.pt"

    def _step_of_source(self) -> int:
        conversion = self.conversion
        for target in conversion.targets:
            if _parts(target)[0] == _STEP:
                needed = {target: [boxes.whole(target.shape)]}
                read = list(conversion.read(needed, memory=ReusedMemory(0)))
                steps = [float(n) for _, _, values in read for n in values.flat]
                if not steps or not (steps[0].is_integer() and 0 <= steps[0] < 2**63):
                    raise errors.CheckpointError(
                        f"{target.name} of {conversion.job.source} is"
                        f" {steps[0] if steps else 'empty'}, which is no number of"
                        " steps; use another step of the checkpoint"
                    )
                return int(steps[0])
        for key in _STEP_VALUES:
            value = conversion.checkpoint.values.get(key)
            if type(value) is int:
                return value
        if any(kinds.intersection(_MOMENTS) for kinds in self._kinds.values()):
            raise errors.CheckpointError(
                f"{conversion.job.source} has moments, and no step of the optimizer;"
                f" add {_STEP}/<parameter> to the layout"
            )
        return 0


def _parts(target: TargetTensor) -> tuple[str, str]:
    # The kind and the parameter, which become names of files.
    kind, _, parameter = target.name.partition("/")
    if not parameter or kind in _OTHERS:
        raise errors.CheckpointError(
            f"{target.name!r} is no state that DeepSpeed restores; have the layout name"
            f" targets {_MASTER}/<parameter>, {_MOMENTS[0]}/<parameter>,"
            f" {_MOMENTS[1]}/<parameter> and {_STEP}/<parameter>, and drop others"
        )
    for name, place in ((parameter, "the parameter"), (kind, "the state")):
        if set(name) & set("/\\\0") or name in ("", ".", ".."):
            raise errors.CheckpointError(
                f"{place} {name!r} cannot be the name of a file or directory; rename it"
            )
    return kind, parameter
