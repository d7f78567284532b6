"""Writes DeepSpeed's universal checkpoints: files for each parameter, and common ones.

    folder = UniversalFolder("converted", tag="global_step300")
    folder.write("1.mlp.weight", "master", array)      # once for each state
    folder.commit(step=300)

    converted/global_step300/zero/1.mlp.weight/{fp32,exp_avg,exp_avg_sq,step}.pt
    converted/global_step300/zero/optimizer_state.pt
    converted/global_step300/mp_rank_00_model_states.pt
    converted/latest_universal

DeepSpeed restores it with the option `load_universal_checkpoint`, at any parallelism,
from the float32 masters and moments. Learning rate, betas and other options are those
of the run that loads it; with a scheduler, `load_lr_scheduler_states=False` is
required, or its state among `values`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.universal.formats import deepspeed_universal, state_kinds
from elastic_ckpt.universal.writing import torch_file

# DeepSpeed takes as many groups as its optimizer has; empty ones change no option.
_MOST_GROUPS = 1024
# DeepSpeed refuses files without a version. They are like those of this one.
_DEEPSPEED = "0.19.8"
_KEYS = {kind: key for key, kind in state_kinds.KINDS.items()}
_STEP = "step"


class UniversalFolder:
    """A universal checkpoint that is written.

    States can be written by several threads or processes; one commits.

    Args:
      root: of the checkpoints of a run, local or in a bucket.
      tag: the name of the checkpoint in it.

    Raises:
      CheckpointError: if the tag cannot be used.
    """

    def __init__(self, root: epath.PathLike, *, tag: str) -> None:
        _check_name(tag, "the tag")
        self._root = storage.absolute(root)
        self._tag = tag
        self._zero = self._root / tag / "zero"

    def write(
        self,
        parameter: str,
        kind: str,
        array: np.ndarray,
        *,
        facts: Mapping[str, Any] | None = None,
    ) -> epath.Path:
        """Writes a state of a whole parameter.

        Args:
          parameter: its name in the model that loads it.
          kind: `master`, `first_moment`, `second_moment`, `step`, or the optimizer's
            name of another state.
          array: its values; a number for `step`. DeepSpeed computes in float32.
          facts: for tensor parallelism: `cat_dim` (the dim along which ranks cut it, 0
            by default), `param_n_sub_params` (parts that each rank has a part of),
            `vocab_tensor` (True if ranks pad its rows).

        Returns:
          The path of the file.

        Raises:
          CheckpointError: if the parameter or kind cannot be the name of a file.
          FormatError: if PyTorch has no such dtype.
          OSError: if storage fails, or another of `bucket_clients.failures`.
        """
        path = self.path(parameter, kind)
        storage.make_directory(path.parent)
        # Steps are alone in their files.
        value = array if kind == _STEP else {**(facts or {}), "param": array}
        torch_file.write(path, value)
        return path

    def path(self, parameter: str, kind: str) -> epath.Path:
        """The path of the file of a state; see `write`.

        Raises:
          CheckpointError: if the parameter or kind cannot be the name of a file.
        """
        key = _KEYS.get(kind, kind)
        _check_name(parameter, "the parameter")
        _check_name(key, "the state")
        return self._zero / parameter / f"{key}.pt"

    def commit(self, *, step: int, values: Mapping[str, Any] | None = None) -> None:
        """Writes the common files, then makes this checkpoint the latest.

        Args:
          step: of the optimizer.
          values: to add to the file of the model, such as `lr_scheduler`, `iteration`.

        Raises:
          CheckpointError: if no state was written.
          OSError: if storage fails, or another of `bucket_clients.failures`.
        """
        if not self._zero.exists():
            raise errors.CheckpointError(
                f"{self._zero} has no parameters; write some before"
            )
        groups: list[dict[str, Any]] = [{} for _ in range(_MOST_GROUPS)]
        optimizer = {
            "ds_version": _DEEPSPEED,
            "param_groups": groups,
            # ZeRO-3 has all here, and one step for all parameters.
            "optimizer_state_dict": {
                "state": {0: {_STEP: np.array(step, np.float32)}},
                "param_groups": groups[:1],
            },
        }
        torch_file.write(self._zero / "optimizer_state.pt", optimizer)
        model = {
            "module": None,
            "optimizer": None,
            "lr_scheduler": None,
            "buffer_names": [],
            "param_shapes": None,
            "skipped_steps": 0,
            "global_steps": step,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_version": _DEEPSPEED,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
            **(values or {}),
        }
        # The second name is the one that ZeRO-3 reads.
        for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
            torch_file.write(self._root / self._tag / f"{name}_model_states.pt", model)
        latest = self._root / deepspeed_universal.LATEST
        storage.write_atomic(latest, self._tag.encode())


def _check_name(name: str, place: str) -> None:
    if not name or "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
        raise errors.CheckpointError(
            f"{place} {name!r} cannot be the name of a file or directory; rename it"
        )
