"""Decodes pickles of plain data; imports nothing and calls nothing that they name.

Python's unpickler imports whatever a file names, and allocates memory for whatever
length or memo number a file claims. This decoder has neither problem: it accepts the
opcodes that Python writes for plain data in protocols 2 to 5, and names from an exact
table, which stand for values and constructors of the caller. Everything else is an
error that names the file. A value is bounded: by the bytes of the pickle, by the limits
of `value_size`, and what calls copy of it by `MOST_COPIED_BYTES`. There are no cycles.
"""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

from elastic_ckpt.universal.formats import value_size
from elastic_ckpt.universal.formats.format_error import FormatError

# So many opcodes take less than 1 GiB and 10 seconds.
MOST_OPERATIONS = 8_000_000
# An empty set takes four times as much as another value.
_MOST_SETS = 100_000
# A call takes a few opcodes, and might copy a text or list of any size.
MOST_COPIED_BYTES = 1 << 28
_MOST_KEY_PARTS = 100
# Copies of shapes and of records' attributes, which opcodes limit.
_SMALL_BYTES = 400

_MARK = object()


class Record(dict[str, Any]):
    """The attributes of an object of a class of another program; nothing else of it."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A name that a pickle may call: with it the decoder calls `function` instead.

    Attributes:
      name: as the pickle has it.
      function: makes an inert value of the arguments; raises TypeError or ValueError.
    """

    name: str
    function: Callable[..., Any] = dataclasses.field(repr=False)


def record(name: str) -> Call:
    """Stands for a class, whose objects become records. Arguments are dropped."""
    return Call(name, lambda *_: Record())


def decode(
    content: bytes,
    *,
    file: str,
    names: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
    check_size: bool = True,
    most_operations: int = MOST_OPERATIONS,
) -> Any:
    """The value of a pickle.

    Args:
      content: the pickle, and nothing after it.
      file: where it comes from, for messages.
      names: by "module name": a `Call`, or the value that the name stands for.
      persistent: makes a value of a persistent id; raises ValueError.
      check_size: whether a value that nests deep, or is huge when it is copied, is an
        error; False only if the caller follows no parts that may be shared or nested.
      most_operations: the opcodes that it may have.

    Raises:
      FormatError: if it has another opcode or name, is cut short or malformed, or
        holds too much.
    """
    decoder = _Decoder(content, file, names, persistent)
    try:
        value = decoder.run(most_operations)
    except (struct.error, IndexError, KeyError, ValueError) as error:
        # The stack, the memo, or the content ended early.
        raise decoder.error(f"is malformed or cut short ({error})") from None
    if check_size:
        value_size.check(value, file)
    return value


def shown(value: Any) -> str:
    """A short text of a decoded value, for messages; its parts are not followed."""
    if isinstance(value, str | bytes):
        return repr(value[:60])
    if isinstance(value, int | float | None):
        return repr(value)
    return f"a {type(value).__name__}"


class _Decoder:
    def __init__(
        self,
        content: bytes,
        file: str,
        names: Mapping[str, Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self._content = content
        self._at = 0
        self._file = file
        self._names = names
        self._persistent = persistent
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._num_sets = 0
        self._copied_bytes = 0

    def error(self, what: str) -> FormatError:
        return FormatError(f"{self._file} {what}, at byte {self._at} of its pickle")

    def run(self, most_operations: int) -> Any:
        content, operations = self._content, _OPERATIONS
        for _ in range(most_operations):
            opcode = content[self._at]
            self._at += 1
            if opcode == _STOP:
                break
            operation = operations.get(opcode)
            if operation is None:
                raise self.error(
                    f"has the pickle opcode {bytes([opcode])!r}, which plain data does"
                    " not have; it was not written by torch.save of a state dict, or"
                    " is damaged"
                )
            operation(self)
        else:
            raise self.error(
                f"has more than {most_operations} opcodes, and no more are read"
            )
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise self.error("is malformed (its pickle ends with an open value)")
        if self._at != len(content):
            raise self.error("goes on after the end of its pickle")
        return self.stack[0]

    def take(self, size: int) -> bytes:
        taken = self._content[self._at : self._at + size]
        if len(taken) != size:
            raise self.error("is cut short")
        self._at += size
        return taken

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self, size: int) -> str:
        return self.take(self.unsigned(size)).decode("utf-8", "surrogatepass")

    def line(self) -> str:
        end = self._content.index(b"\n", self._at, self._at + 1000)
        return self.take(end + 1 - self._at)[:-1].decode()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise self.error("is malformed (a value is missing)")
        return value

    def pop_to_mark(self) -> list[Any]:
        stack = self.stack
        start = len(stack) - 1
        while stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise self.error("is malformed (a mark is missing)")
        taken = stack[start + 1 :]
        del stack[start:]
        return taken

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise self.error(
                f"is malformed (a {kind.__name__} is expected, not a"
                f" {type(value).__name__})"
            )
        return value

    def set_items(self, items: list[Any]) -> None:
        mapping = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            mapping[self._hashable(key)] = value

    def empty_set(self) -> None:
        self._num_sets += 1
        if self._num_sets > _MOST_SETS:
            raise self.error(f"has more than {_MOST_SETS} sets")
        self.push(set())

    def add_items(self) -> None:
        items = self.pop_to_mark()
        self.top(set).update(map(self._hashable, items))

    def append(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def frozen(self) -> None:
        self.push(frozenset(map(self._hashable, self.pop_to_mark())))

    def tuple_of(self, size: int) -> None:
        parts = [self.pop() for _ in range(size)]
        self.push(tuple(reversed(parts)))

    def _hashable(self, key: Any) -> Any:
        if type(key) is str:
            return key
        # Python hashes tuples by recursion and each time anew, and large integers to
        # few numbers.
        parts = key if isinstance(key, tuple) else (key,)
        if (
            isinstance(key, frozenset)
            or len(parts) > _MOST_KEY_PARTS
            or any(isinstance(part, tuple | frozenset) for part in parts)
            or any(isinstance(part, int) and part.bit_length() > 64 for part in parts)
        ):
            raise self.error(
                "has a key that is a nested or long tuple, or a number of over 64 bits,"
                " which is not supported"
            )
        try:
            hash(key)
        except TypeError as error:
            raise self.error(f"is malformed ({error})") from None
        return key

    def put(self, number: int) -> None:
        self._memo[number] = self.stack[-1]
        if self.stack[-1] is _MARK:
            raise self.error("is malformed (a mark is kept)")

    def memoize(self) -> None:
        self.put(len(self._memo))

    def get(self, number: int) -> None:
        self.push(self._memo[number])

    def global_(self, module: Any, name: Any) -> None:
        full = f"{module} {name}"
        if full not in self._names:
            raise self.error(
                f"names {module}.{name}, which is not among the names that are read"
                " (nothing was imported or called); if you trust the file, load it"
                " where it was written and save a state dict of tensors, numbers,"
                " texts, lists and dicts alone"
            )
        self.push(self._names[full])

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self.error("is malformed (a name is no text)")
        self.global_(module, name)

    def call(self, *, with_keywords: bool = False) -> None:
        keywords = self.pop() if with_keywords else {}
        arguments, callee = self.pop(), self.pop()
        if not isinstance(callee, Call):
            raise self.error(f"calls a {type(callee).__name__}, which is no function")
        if type(arguments) is not tuple or keywords:
            raise self.error("is malformed (arguments are no tuple)")
        self._count(*arguments)
        try:
            value = callee.function(*arguments)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.error(f"has an invalid {callee.name} ({error})") from None
        self._count(value)
        self.push(value)

    def build(self) -> None:
        state, value = self.pop(), self.stack[-1]
        if not isinstance(value, dict):
            raise self.error("sets attributes of something that has none")
        # Attributes of dicts (`_metadata` of a state dict) are no values.
        if isinstance(value, Record):
            self._count(state)
            value.update(state if type(state) is dict else {"state": state})

    def _count(self, *copied: Any) -> None:
        # Without the parts, which are not copied.
        large = [size for size in map(sys.getsizeof, copied) if size > _SMALL_BYTES]
        if large:
            self._copied_bytes += sum(large)
            if self._copied_bytes > MOST_COPIED_BYTES:
                raise self.error(
                    f"has calls that copy more than {MOST_COPIED_BYTES} bytes; it was"
                    " made to exhaust memory"
                )

    def persistent_id(self) -> None:
        if self._persistent is None:
            raise self.error("has a persistent id, which plain pickles do not have")
        try:
            self.push(self._persistent(self.pop()))
        except (TypeError, ValueError) as error:
            raise self.error(f"has an invalid storage ({error})") from None

    def protocol(self) -> None:
        version = self.unsigned(1)
        if not 2 <= version <= 5:
            raise self.error(
                f"has pickle protocol {version}, and this program reads 2 to 5"
            )


def _long(decoder: _Decoder) -> None:
    # At most 255 bytes: longer integers have another opcode, which is refused.
    number = decoder.take(decoder.unsigned(1))
    decoder.push(int.from_bytes(number, "little", signed=True))


_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[_Decoder], object]] = {
    ord(opcode): operation
    for opcode, operation in {
        "\x80": _Decoder.protocol,
        # A frame only helps to read ahead.
        "\x95": lambda d: d.take(8),
        "(": lambda d: d.stack.append(_MARK),
        "0": lambda d: d.pop(),
        "1": lambda d: d.pop_to_mark(),
        "N": lambda d: d.stack.append(None),
        "\x88": lambda d: d.stack.append(True),
        "\x89": lambda d: d.stack.append(False),
        "J": lambda d: d.stack.append(d.number("<i")),
        "K": lambda d: d.stack.append(d.unsigned(1)),
        "M": lambda d: d.stack.append(d.unsigned(2)),
        "\x8a": _long,
        "G": lambda d: d.stack.append(d.number(">d")),
        "X": lambda d: d.stack.append(d.text(4)),
        "\x8c": lambda d: d.stack.append(d.text(1)),
        "\x8d": lambda d: d.stack.append(d.text(8)),
        "B": lambda d: d.stack.append(d.take(d.unsigned(4))),
        "C": lambda d: d.stack.append(d.take(d.unsigned(1))),
        "\x8e": lambda d: d.stack.append(d.take(d.unsigned(8))),
        "}": lambda d: d.stack.append({}),
        "]": lambda d: d.stack.append([]),
        ")": lambda d: d.stack.append(()),
        "\x8f": _Decoder.empty_set,
        "t": lambda d: d.stack.append(tuple(d.pop_to_mark())),
        "\x85": lambda d: d.tuple_of(1),
        "\x86": lambda d: d.tuple_of(2),
        "\x87": lambda d: d.tuple_of(3),
        "\x91": _Decoder.frozen,
        "\x90": _Decoder.add_items,
        "a": lambda d: d.append([d.pop()]),
        "e": lambda d: d.append(d.pop_to_mark()),
        "s": lambda d: d.set_items([d.pop(), d.pop()][::-1]),
        "u": lambda d: d.set_items(d.pop_to_mark()),
        "q": lambda d: d.put(d.unsigned(1)),
        "r": lambda d: d.put(d.unsigned(4)),
        "\x94": _Decoder.memoize,
        "h": lambda d: d.get(d.unsigned(1)),
        "j": lambda d: d.get(d.unsigned(4)),
        "c": lambda d: d.global_(d.line(), d.line()),
        "\x93": _Decoder.stack_global,
        "R": _Decoder.call,
        "\x81": _Decoder.call,
        "\x92": lambda d: d.call(with_keywords=True),
        "b": _Decoder.build,
        "Q": _Decoder.persistent_id,
    }.items()
}
