"""The names that pickles of `torch.save` have, and what stands for each of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from elastic_ckpt.universal.formats import torch_tensor
from elastic_ckpt.universal.formats.inert_values import Call
from elastic_ckpt.universal.formats.torch_tensor import (
    DTYPES,
    Storage,
    StorageKind,
    Tensor,
    number,
)

# Names of PyTorch's dtypes, by those of storages.
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}


def _tensor_v2(
    storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any
) -> Tensor:
    # The first two of the rest are about gradients.
    _check_metadata(rest[2:])
    dtype = storage.dtype if isinstance(storage, Storage) else None
    return torch_tensor.view(storage, offset, shape, strides, dtype)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any
) -> Tensor:
    if len(rest) < 3 or not isinstance(rest[2], np.dtype):
        raise ValueError("it has no type")
    _check_metadata(rest[3:])
    return torch_tensor.view(storage, offset, shape, strides, rest[2])


def _check_metadata(rest: tuple[Any, ...]) -> None:
    # PyTorch conjugates and negates views lazily, by a bit of the tensor.
    for metadata in rest[:1]:
        for bit in ("conj", "neg") if isinstance(metadata, dict) else ():
            if metadata.get(bit):
                raise ValueError(
                    f"its {bit} bit is set, which is not read; call"
                    f" resolve_{bit}() before it is saved"
                )


def _parameter(value: Any, *_: Any) -> Any:
    if not isinstance(value, Tensor):
        raise ValueError("it is no tensor")
    return value


def _sizes(dims: Any = ()) -> tuple[int, ...]:
    if not isinstance(dims, tuple | list):
        raise ValueError("it is no sequence")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim < 1 << 63:
            number(dim, "a dim")
    return tuple(dims)


def _mapping(pairs: Any = ()) -> dict[Any, Any]:
    if isinstance(pairs, dict):
        return dict(pairs)
    if not isinstance(pairs, list | tuple) or pairs:
        raise ValueError("only an empty one, or one of a dict, is read")
    return {}


def _latin_1(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes are texts in latin1")
    return text.encode("latin1")


def _set(items: Any = ()) -> set[Any]:
    if not isinstance(items, list | tuple):
        raise ValueError("it is no sequence")
    if not all(isinstance(item, str | int | float | None) for item in items):
        raise ValueError("only texts and numbers are read")
    # Those of equal hashes would take long to compare.
    if any(isinstance(item, int) and item.bit_length() > 64 for item in items):
        raise ValueError("it has a number of over 64 bits")
    return set(items)


def _device(kind: Any, index: Any = None) -> str:
    if not isinstance(kind, str):
        raise ValueError("it is no text")
    return kind if index is None else f"{kind}:{number(index, 'its number')}"


_TENSOR = Call("tensor", _tensor_v2)
_PARAMETER = Call("parameter", _parameter)


def _from_type(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    # A tensor with attributes, which are dropped.
    if kind is not None or not isinstance(arguments, tuple):
        raise ValueError("its type is no tensor")
    for each in (_TENSOR, _PARAMETER):
        if function is each:
            return each.function(*arguments)
    raise ValueError("nothing that makes tensors makes it")


NAMES: dict[str, Any] = {
    **{
        f"{module} {name}": StorageKind(DTYPES[dtype])
        for name, dtype in STORAGES.items()
        for module in ("torch", "torch.storage")
    },
    **{f"torch {name}": dtype for name, dtype in DTYPES.items()},
    "torch.storage UntypedStorage": StorageKind(None),
    "torch._utils _rebuild_tensor": _TENSOR,
    "torch._utils _rebuild_tensor_v2": _TENSOR,
    "torch._utils _rebuild_tensor_v3": Call("tensor", _tensor_v3),
    "torch._utils _rebuild_parameter": _PARAMETER,
    "torch._utils _rebuild_parameter_with_state": _PARAMETER,
    "torch._tensor _rebuild_from_type_v2": Call("tensor", _from_type),
    "torch Tensor": None,
    "torch.nn.parameter Parameter": None,
    "torch Size": Call("size", _sizes),
    "torch device": Call("device", _device),
    "collections OrderedDict": Call("OrderedDict", _mapping),
    "collections Counter": Call("Counter", _mapping),
    "_codecs encode": Call("bytes", _latin_1),
    "__builtin__ set": Call("set", _set),
    "builtins set": Call("set", _set),
}
