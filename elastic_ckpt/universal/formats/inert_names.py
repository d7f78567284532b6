"""The names in checkpoints of DeepSpeed and Megatron that a pickle may have.

Objects become records of their attributes, enumerations their numbers. Nothing of these
programs is imported; any other name is refused, see `closed_pickle`.
"""

from __future__ import annotations

from typing import Any

from elastic_ckpt.universal.formats.inert_values import Call, record


def _number(name: str) -> Call:
    # A member of an enumeration.
    return Call(name, lambda value: value)


def _path(*parts: object) -> str:
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) != len(parts):
        raise ValueError("its parts are no texts")
    return "/".join(texts)


_RECORDS = (
    "argparse Namespace",
    "types SimpleNamespace",
    "deepspeed.checkpoint.universal_checkpoint SubparamShape",
    "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler LossScaler",
    "deepspeed.utils.tensor_fragment fragment_address",
    "deepspeed.utils.types fragment_address",
    # States of random number generators are arrays of NumPy. They are not restored.
    "numpy dtype",
    "numpy ndarray",
    "numpy.core.multiarray _reconstruct",
    "numpy._core.multiarray _reconstruct",
    "numpy.core.multiarray scalar",
    "numpy._core.multiarray scalar",
)
_NUMBERS = (
    "deepspeed.runtime.zero.config ZeroStageEnum",
    "megatron.core.enums ModelType",
    "megatron.core.transformer.enums AttnBackend",
    "megatron.core.transformer.enums AttnMaskType",
    "megatron.core.transformer.enums LayerType",
    "megatron.core.transformer.enums ModelType",
    "megatron.core.rerun_state_machine RerunDiagnostic",
    "megatron.core.rerun_state_machine RerunMode",
    "megatron.core.rerun_state_machine RerunState",
    "megatron.enums PositionEmbeddingType",
    "megatron.model.enums PositionEmbeddingType",
    "signal Signals",
)
NAMES: dict[str, Any] = {
    **{name: record(name.replace(" ", ".")) for name in _RECORDS},
    **{name: _number(name.replace(" ", ".")) for name in _NUMBERS},
    "pathlib PosixPath": Call("pathlib.PosixPath", _path),
}
