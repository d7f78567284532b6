"""Decodes pickles in a process of its own, under limits; `plain_pickle` starts it.

Python's unpickler in C allocates whatever a file claims, may overflow the stack, and
calls what it is given. So here it is given nothing: names are never imported, but stand
for types of this file, most of them for `Inert`, which keeps arguments and a state. The
kernel limits memory and time, a process that breaks ends alone, and what it answers are
texts and numbers. It needs the standard library alone (`python -I -S`).

A request is a line of JSON and a pickle, an answer a line of JSON and its content:

    {"kind": "value", "size": 91, "memory": 5e8, "seconds": 9, "most": 1e8}
    {"size": 12, "columns": [], "seconds": 0.01}

It ends when its parent does, and when it has had nothing to do for the seconds that are
its argument.
"""

from __future__ import annotations

import array
import fcntl
import gc
import io
import json
import os
import pickle
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, ClassVar

_LARGE_BYTES = 16 << 20
_kept: Any = None
# Shared parts count as often as they are referred to.
MOST_NODES = 2_000_000
MOST_NESTED = 100
# The kinds of nodes of an answer, which are lists; texts and numbers are themselves.
LIST, TUPLE, DICT, SET, BYTES, TENSOR, NAME, RECORD = range(8)

_MOST_KEYS, _MOST_PARTS = 10_000, 100
_TEXT_BYTES = 4


class Refused(Exception):
    """The reason for which a pickle is refused; it continues a sentence."""


class _Closed(type):
    # A pickle may set attributes of what is on its stack, types of this file as well.
    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError("sets an attribute of a class")


class Inert(metaclass=_Closed):
    """An object of another program: what its pickle has of it."""

    __slots__ = ("arguments", "parts", "state")
    full_name: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    parts: Any
    state: Any

    def __new__(cls, *arguments: Any, **_: Any) -> Any:
        """Keeps the arguments."""
        made = object.__new__(cls)
        made.arguments = arguments
        return made

    def __setstate__(self, state: Any) -> None:
        """Keeps the state."""
        self.state = state

    def append(self, part: Any) -> None:
        """Adds a part of an object that is a list."""
        self.extend([part])

    def extend(self, parts: Any) -> None:
        """Adds parts of an object that is a list."""
        if not isinstance(getattr(self, "parts", None), list):
            self.parts = []
        self.parts += parts

    def add(self, part: Any) -> None:
        """Adds a part of an object that is a set."""
        self.extend([part])

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(getattr(self, "parts", None), dict):
            self.parts = {}
        self.parts[key] = value


class _State(metaclass=_Closed):
    # An object of which there are many, and of which the state alone is needed.
    __slots__ = ("state",)
    full_name: ClassVar[str] = ""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dict(dict[Any, Any], metaclass=_Closed):
    # Its arguments are those of a dict, or the default of one; attributes are dropped.
    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*(each for each in arguments if isinstance(each, dict | list)))

    def __setstate__(self, state: Any) -> None:
        pass


class _Storage(tuple[Any, ...], metaclass=_Closed):
    # Its kind, its key, and the number of its elements.
    __slots__ = ()


class _Tensor(tuple[Any, ...], metaclass=_Closed):
    # A storage, an offset, a shape, strides, a type (if it is not that of the storage)
    # and a view, which the parent checks.
    __slots__ = ()


def _tensor(*arguments: Any) -> _Tensor:
    # Behind the strides are two arguments about gradients, and the bits of lazy views.
    if len(arguments) < 4:
        raise Refused("has an invalid tensor (it has too few fields)")
    storage, offset, shape, strides = arguments[:4]
    if type(storage) is not _Storage:
        raise Refused("has an invalid tensor (it has no storage)")
    if type(shape) is not tuple or type(strides) is not tuple:
        raise Refused("has an invalid tensor (its shape and strides are no tuples)")
    if not all(type(each) is int for each in (offset, *shape, *strides)):
        raise Refused("has an invalid tensor (a dim is no number from 0 up)")
    bits = arguments[6] if len(arguments) > 6 else None
    bits = bits if isinstance(bits, dict) else {}
    view = " ".join(bit for bit in ("conj", "neg") if bits.get(bit))
    return _Tensor((storage, offset, shape, strides, None, view))


def _typed_tensor(*arguments: Any) -> _Tensor:
    # The third version, which has a type before the bits.
    dtype: Any = arguments[6] if len(arguments) > 6 else None
    if not _is_name(dtype):
        raise Refused("has an invalid tensor (it has no type)")
    *fields, _, view = _tensor(*arguments[:6], *arguments[7:])
    return _Tensor((*fields, dtype.full_name, view))


def _from_type(function: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    # A tensor with attributes, which are dropped; of another class it is no tensor.
    is_plain = getattr(kind, "full_name", "") in _PLAIN_TENSORS
    is_made = any(function is _TYPES[f"torch._utils.{name}"] for name in _REBUILDS)
    return function(*arguments) if is_plain and is_made else Inert(function, kind)


def _maker(function: Callable[..., Any]) -> type:
    """A type that is called in place of a function, which it hides from the pickle."""
    fields = {"__slots__": (), "__new__": lambda _, *arguments: function(*arguments)}
    return _Closed("Maker", (), fields)


def _named(base: type, full_name: str) -> type:
    """The type of the objects of a class, which keep what `base` keeps."""
    return _Closed(base.__name__, (base,), {"__slots__": (), "full_name": full_name})


_PLAIN_TENSORS = (
    *("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"),
    "torch.nn.Parameter",
)
_REBUILDS = {
    **dict.fromkeys(("_rebuild_tensor", "_rebuild_tensor_v2"), _tensor),
    "_rebuild_tensor_v3": _typed_tensor,
    **dict.fromkeys(
        ("_rebuild_parameter", "_rebuild_parameter_with_state"), lambda value, *_: value
    ),
}
_MAKERS: dict[str, Callable[..., Any]] = {
    **{f"torch._utils.{name}": function for name, function in _REBUILDS.items()},
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.device": lambda *parts: ":".join(map(str, filter(_is_scalar, parts))),
    "torch.serialization._get_layout": lambda name: name,
    "_codecs.encode": lambda text, *_: text.encode("latin1"),
    "pathlib.PosixPath": lambda *parts: os.path.join("", *parts),
    "pathlib._local.PosixPath": lambda *parts: os.path.join("", *parts),
    **dict.fromkeys(
        ("copy_reg._reconstructor", "copyreg._reconstructor"),
        lambda kind, *_: kind() if _is_name(kind) else Inert(),
    ),
}
_DCP = "torch.distributed.checkpoint."
_TYPES: dict[str, type] = {
    **{name: _maker(function) for name, function in _MAKERS.items()},
    "torch.Size": tuple,
    _DCP + "metadata._MEM_FORMAT_ENCODING": int,
    **{
        f"collections.{name}": _Dict
        for name in ("OrderedDict", "Counter", "defaultdict")
    },
    **{f"{module}.set": set for module in ("__builtin__", "builtins")},
    **{f"{module}.frozenset": frozenset for module in ("__builtin__", "builtins")},
    **{
        name: _named(_State, name)
        for name in (
            *(_DCP + "metadata.Metadata", _DCP + "metadata.MetadataIndex"),
            *(
                _DCP + "metadata.TensorStorageMetadata",
                _DCP + "metadata.TensorProperties",
            ),
            _DCP + "metadata.BytesStorageMetadata",
            *(_DCP + "metadata.ChunkStorageMetadata", _DCP + "filesystem._StorageInfo"),
            # Of earlier versions.
            "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        )
    },
}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | int | float | None)


def _is_name(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Inert | _State)


class _Unpickler(pickle.Unpickler):
    def __init__(self, reader: Any) -> None:
        super().__init__(reader)
        self._names: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        found = _TYPES.get(full_name) or self._names.get(full_name)
        if found is None:
            found = self._names[full_name] = _named(Inert, full_name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        # Later versions add what describes a view.
        if type(pid) is not tuple or len(pid) not in (5, 6):
            raise Refused("has an invalid storage (it is no tuple of five)")
        tag, kind, key, _, num_elements = pid[:5]
        if tag != "storage" or not _is_name(kind):
            raise Refused("has an invalid storage (it names no storage)")
        if type(key) is not str or type(num_elements) is not int:
            raise Refused(
                "has an invalid storage (its key is no text or its size no number)"
            )
        return _Storage((kind.full_name, key, num_elements))


class _Answer:
    """Nodes of a value, each a list of its kind and its parts, and its tensors."""

    def __init__(self, most_bytes: int) -> None:
        self._left_bytes = most_bytes
        self._left_nodes = MOST_NODES
        self._left_keys = _MOST_KEYS
        self._tensors: dict[int, int] = {}
        self.rows: list[Any] = []

    def node(self, value: Any, depth: int = 0) -> Any:
        """The value; parts that it shares are repeated."""
        self._left_nodes -= 1
        if depth > MOST_NESTED or self._left_nodes < 0 or self._left_bytes < 0:
            raise Refused(
                f"holds more than {MOST_NODES} values, or values nested deeper than"
                f" {MOST_NESTED}; it is no state dict, or made to exhaust memory"
            )
        kind = type(value)
        if kind is str:
            self._left_bytes -= _TEXT_BYTES * len(value)
            return value
        if value is None or kind is bool or kind is float:
            return value
        if kind is int:
            # Longer ones have no text.
            return value if value.bit_length() < 10_000 else None
        if kind is dict or kind is _Dict:
            return [DICT, *self._flat(value, depth)]
        if kind is list or kind is tuple:
            parts = (self.node(each, depth + 1) for each in value)
            return [LIST if kind is list else TUPLE, *parts]
        if kind is set or kind is frozenset:
            return [SET, *(self._key(each, depth) for each in value)]
        if kind is bytes or kind is bytearray:
            self._left_bytes -= _TEXT_BYTES * len(value)
            return [BYTES, bytes(value).decode("latin1")]
        if kind is _Tensor:
            return [TENSOR, self._tensor(value)]
        if _is_name(value):
            return [NAME, value.full_name]
        return self._object(value, depth)

    def _flat(self, mapping: dict[Any, Any], depth: int) -> Iterator[Any]:
        for key, each in mapping.items():
            yield self._key(key, depth)
            yield self.node(each, depth + 1)

    def _key(self, key: Any, depth: int) -> Any:
        # Those of equal hashes can be made of tuples and of large numbers; dicts of
        # them take time that grows with the square of their number.
        parts = key if type(key) is tuple else (key,)
        if not all(map(_is_scalar, parts)) or type(key) is tuple:
            self._left_keys -= 1
        if self._left_keys < 0:
            raise Refused(f"has over {_MOST_KEYS} keys that are no texts or numbers")
        if (
            len(parts) > _MOST_PARTS
            or any(isinstance(part, tuple | frozenset) for part in parts)
            or any(isinstance(part, int) and part.bit_length() > 64 for part in parts)
        ):
            raise Refused(
                "has a key that is a nested or long tuple, or a number of over 64 bits,"
                " which is not supported"
            )
        return self.node(key, depth + 1)

    def _tensor(self, value: Any) -> int:
        number = self._tensors.setdefault(id(value), len(self.rows))
        if number == len(self.rows):
            storage, *fields = value
            self._left_nodes -= 8 + len(fields[1]) + len(fields[2])
            self.rows.append([*storage, *fields])
        return number

    def _object(self, value: Any, depth: int) -> Any:
        # A number of an enumeration, the parts of a container, or attributes.
        parts = getattr(value, "parts", None)
        if isinstance(parts, dict | list):
            return self.node(parts, depth)
        state = getattr(value, "state", None)
        if type(state) is tuple and set(map(type, state)) <= {dict, type(None)}:
            # Of a class with slots.
            state = {key: each for part in state for key, each in (part or {}).items()}
        if type(state) is dict:
            return [RECORD, *self._flat(state, depth)]
        if state is not None:
            return [RECORD, "state", self.node(state, depth + 1)]
        arguments = getattr(value, "arguments", ())
        plain = [each for each in arguments if not _is_name(each)]
        if len(plain) == 1 and _is_scalar(plain[0]):
            return self.node(plain[0], depth)
        return [RECORD]


def _value(content: bytes, most_bytes: int) -> tuple[Any, list[Any]]:
    loaded = _loaded(content)
    answer = _Answer(most_bytes)
    return {"value": answer.node(loaded), "tensors": answer.rows}, []


def _loaded(content: bytes) -> Any:
    global _kept
    # A buffer reads ahead; calls for each opcode would be slow.
    reader = io.BufferedReader(io.BytesIO(content), 1 << 17)
    loaded = _Unpickler(reader).load()
    if reader.tell() != len(content):
        raise Refused("goes on after the end of its pickle")
    if len(content) > _LARGE_BYTES:
        # The process ends after its answer, which is faster than to free this.
        _kept = loaded
    return loaded


class _Numbers(dict[Any, int]):
    # The number of each distinct value, in the order of their first use.
    def __missing__(self, key: Any) -> int:
        number = self[key] = len(self)
        return number


class _Shapes(_Numbers):
    def __missing__(self, key: Any) -> int:
        if key is not None and not (
            type(key) is tuple and set(map(type, key)) <= {int}
        ):
            kinds = [type(each).__name__ for each in key[:9]]
            raise Refused(f"has the shape {kinds}, which is none")
        return super().__missing__(key)


def _metadata(content: bytes, most_bytes: int) -> tuple[Any, list[Any]]:
    """The tensors and items of a file `.metadata`, as columns.

    A tensor has a name, a type, a shape and chunks; a chunk has its first element, its
    shape, and an item, which is a place in a file. Names, shapes, types and files are
    listed, the columns have their numbers.
    """
    fields = _state(_loaded(content))
    fields = fields if isinstance(fields, dict) else {}
    stored, entries = map(fields.get, ("storage_data", "state_dict_metadata"))
    if not isinstance(stored, dict) or not isinstance(entries, dict):
        raise Refused("is no metadata of a distributed checkpoint (it lists no items)")
    shapes, files, dtypes = _Shapes(), _Numbers(), _Numbers()
    whole = shapes[None]
    columns = [array.array("q") for _ in range(8)]
    dtype_of, shape_of, count_of, starts, sizes, file_of, offsets, lengths = columns
    items = {}
    for index, info in stored.items():
        place = index.state
        items[place["fqn"], shapes[place.get("offset")]] = info.state

    def add_item(item: dict[str, Any]) -> None:
        if item.get("transform_descriptors"):
            listed = item["transform_descriptors"]
            listed = listed if isinstance(listed, list | tuple) else [listed]
            raise Refused(
                "lists items that extensions changed, such as by compression"
                f" ({', '.join(map(_shown, listed[:3]))}); save without extensions"
            )
        name, offset, size = item["relative_path"], item["offset"], item["length"]
        if type(name) is not str:
            raise Refused(f"lists the file {_shown(name)}, which is not beside it")
        if type(offset) is not int or type(size) is not int or min(offset, size) < 0:
            raise Refused(
                f"lists {_shown(size)} bytes from {_shown(offset)} of {name[:60]}"
            )
        file_of.append(files[name])
        offsets.append(offset)
        lengths.append(size)

    names, values = [], []
    for name, entry in entries.items():
        if type(name) is not str:
            raise Refused(f"lists {_shown(name)}, which is no name")
        parts = _state(entry)
        if "chunks" not in parts:
            values.append(name)
            continue
        dtype, layout = _state(parts["properties"])[:2]
        if not _is_name(dtype) or layout != "torch.strided":
            raise Refused(f"has {name[:200]} of an unsupported layout or type")
        chunks = parts["chunks"]
        if len(starts) + len(chunks) > len(items):
            raise Refused(f"has {name[:200]}, whose chunks are nowhere stored")
        names.append(name)
        dtype_of.append(dtypes[dtype.full_name])
        shape_of.append(shapes[parts["size"]])
        count_of.append(len(chunks))
        for chunk in chunks:
            place = chunk.state
            start = shapes[place["offsets"]]
            if (name, start) not in items:
                raise Refused(
                    f"has a chunk of {name[:200]} at {list(place['offsets'])} without"
                    " values"
                )
            starts.append(start)
            sizes.append(shapes[place["sizes"]])
            add_item(items[name, start])
    for name in values:
        if (name, whole) not in items:
            raise Refused(f"has the value {name[:200]}, which is nowhere stored")
        add_item(items[name, whole])
    paths = fields.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    tables = {
        "names": names,
        "values": values,
        "paths": [_path(name, paths.get(name)) for name in (*names, *values)],
        "shapes": list(shapes),
        "files": list(files),
        "dtypes": list(dtypes),
    }
    # What is listed is no larger than the pickle, but for parts that are shared.
    if sum(len(shape or ()) + 1 for shape in shapes) > most_bytes // 8:
        raise Refused("has shapes that take too much memory")
    return tables, columns


def _state(value: Any) -> Any:
    # The fields of a dataclass; one without any has no state.
    state = getattr(value, "state", None)
    return {} if state is None else state


def _path(name: str, keys: Any) -> Any:
    # The keys that lead to a name; 1 if these are its parts between dots, 0 if unknown.
    if type(keys) is not tuple or not set(map(type, keys)) <= {str, int}:
        return 0
    return 1 if keys == tuple(name.split(".")) else keys


def _shown(value: Any) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:60])
    if isinstance(value, int | float | None):
        return repr(value)
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return repr(value[:9])
    return f"a {type(value).__name__}"


_KINDS: dict[str, Callable[[bytes, int], tuple[Any, list[Any]]]] = {
    "value": _value,
    "metadata": _metadata,
}


def _answer(request: dict[str, Any], content: bytes) -> tuple[bytes, list[Any]]:
    _limit(request["memory"], request["seconds"])
    try:
        tables, columns = _KINDS[request["kind"]](content, request["most"])
        encoded = json.dumps(tables).encode()
    except MemoryError:
        raise
    except Refused as error:
        encoded, columns = json.dumps({"error": str(error)}).encode(), []
    except Exception as error:
        text = f"is malformed or cut short ({type(error).__name__}: {str(error)[:999]})"
        encoded, columns = json.dumps({"error": text}).encode(), []
    if len(encoded) > request["most"]:
        encoded = json.dumps({"error": "holds values that take too much memory"})
        return encoded.encode(), []
    return encoded, columns


def _num_bytes() -> int:
    # Of the address space.
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit(memory: int, seconds: int) -> None:
    for limit, most in (
        (resource.RLIMIT_AS, _num_bytes() + memory),
        (resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds),
    ):
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(limit, (most, hard))


def main() -> None:
    """Answers requests until there are no more."""
    with open(0, "rb") as requests, open(1, "wb") as answers:
        _serve(requests, answers)


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(0, fcntl.F_GETFL)
    gc.disable()
    num_bytes = _num_bytes()
    while select.select([0], [], [], float(sys.argv[1]))[0]:
        line = requests.readline()
        if not line:
            break
        request = json.loads(line)
        content = requests.read(request["size"])
        # While it works nothing comes, so that a signal, which ends it, tells that
        # its parent has ended.
        fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC)
        began = time.process_time()
        encoded, columns = _answer(request, content)
        header = {
            "size": len(encoded),
            "columns": [len(each) for each in columns],
            "seconds": time.process_time() - began,
        }
        fcntl.fcntl(0, fcntl.F_SETFL, flags)
        answers.write(json.dumps(header).encode() + b"\n")
        answers.write(encoded)
        for each in columns:
            answers.write(each.tobytes())
        answers.flush()
        if _kept is not None or _num_bytes() > num_bytes + _LARGE_BYTES:
            os._exit(0)
        del content, encoded, columns


if __name__ == "__main__":
    main()
