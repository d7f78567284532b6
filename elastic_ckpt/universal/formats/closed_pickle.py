"""Decodes pickles of plain data; imports nothing and calls nothing that they name.

Python's unpickler imports whatever a file names, allocates memory for whatever length
or memo number a file claims, and ends the process if tuples nest deep. This decoder has
none of these problems: it accepts the opcodes that Python writes for plain data in
protocols 2 to 5, and names from an exact table, which stand for values and constructors
of the caller. Everything else is an error that names the file. A value is bounded: by
the bytes of the pickle, by the limits of `value_size`, and what calls copy of it by
`MOST_COPIED_BYTES`. There are no cycles, but through shells.

The metadata of 1e6 tensors are 1.2e8 opcodes, so the frequent ones are decoded in the
loop itself. That takes 35 seconds; Python's unpickler in C would take 5, but needs a
separate process with limits, and a second decoder of what that process hands back.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from sys import getsizeof
from typing import Any

from elastic_ckpt.universal.formats import value_size
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.inert_values import Call, Record, Shell
from elastic_ckpt.universal.formats.pickle_keys import PickleKeys
from elastic_ckpt.universal.formats.source_budget import SourceBudget

# An empty set takes four times as much as another value.
_MOST_SETS = 100_000
# A call takes a few opcodes, and might copy a text or list of any size.
MOST_COPIED_BYTES = 1 << 28
_NODE_BYTES = 64
# Copies of shapes and of records' attributes, which opcodes limit.
_SMALL_BYTES = 400

_STOP, _MARK, _MEMOIZE, _GET, _LONG_GET, _BYTE = map(ord, ".(\x94hjK")
_TEXT, _EMPTY_TUPLE, _EMPTY_DICT, _TUPLE_1 = map(ord, "\x8c)}\x85")


def decode(
    content: bytes,
    *,
    file: str,
    names: Mapping[str, Any],
    persistent: Callable[[Any], Any] | None = None,
    check_size: bool = True,
    budget: SourceBudget | None = None,
) -> Any:
    """The value of a pickle.

    Args:
      content: the pickle, and nothing after it.
      file: where it comes from, for messages.
      names: by "module name": a `Call`, or the value that the name stands for.
      persistent: makes a value of a persistent id; raises ValueError.
      check_size: whether a value that nests deep, or is huge when it is copied, is an
        error; False only if the caller follows no parts that may be shared or nested.
      budget: of its checkpoint; None if this is all that is read.

    Raises:
      FormatError: if it has another opcode or name, is cut short or malformed, or
        holds too much.
    """
    decoder = _Decoder(content, file, names, persistent)
    budget = budget or SourceBudget()
    try:
        value = decoder.run(budget.operations())
    except (struct.error, IndexError, KeyError, ValueError) as error:
        # The stack, the memo, or the content ended early.
        raise decoder.error(f"is malformed or cut short ({error})") from None
    if check_size:
        # Readers follow, and some copy, each of them.
        budget.take(_NODE_BYTES * value_size.check(value, file), file)
    return value


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
        # The values since the last mark; those before it are in `_marked`.
        self.stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: list[Any] = []
        self._num_sets = 0
        self._keys = PickleKeys()
        self._copied_bytes = 0

    def error(self, what: str, advice: str = "") -> FormatError:
        place = f"at byte {self._at} of its pickle"
        return FormatError(f"{self._file} {what}, {place}{advice and f'; {advice}'}")

    def run(self, allowed: Iterator[None]) -> Any:
        """Opcodes that are most of a pickle are here; others are called."""
        content, operations = self._content, _OPERATIONS
        at, stack, memo, marked = self._at, self.stack, self._memo, self._marked
        for _ in allowed:
            # Values that are cut short end in an IndexError here.
            opcode = content[at]
            at += 1
            if opcode == _MEMOIZE:
                memo.append(stack[-1])
            elif opcode == _GET:
                stack.append(memo[content[at]])
                at += 1
            elif opcode == _LONG_GET:
                stack.append(memo[int.from_bytes(content[at : at + 4], "little")])
                at += 4
            elif opcode == _BYTE:
                stack.append(content[at])
                at += 1
            elif opcode == _TEXT:
                start = at + 1
                at = start + content[at]
                stack.append(str(content[start:at], "utf-8", "surrogatepass"))
            elif opcode == _MARK:
                marked.append(stack)
                stack = self.stack = []
            elif opcode == _EMPTY_TUPLE:
                stack.append(())
            elif opcode == _EMPTY_DICT:
                stack.append({})
            elif opcode == _TUPLE_1:
                stack[-1] = (stack[-1],)
            else:
                self._at = at
                operation = operations.get(opcode)
                if operation is None:
                    break
                operation(self)
                at, stack = self._at, self.stack
        else:
            self._at = at
            raise self.error(
                "has more opcodes, with those of the files beside it, than are read of"
                " files of their size"
            )
        return self._whole(opcode)

    def _whole(self, opcode: int) -> Any:
        # The value, after an opcode that ends the pickle.
        if opcode != _STOP:
            raise self.error(
                f"has the pickle opcode {bytes([opcode])!r}, which plain data does"
                " not have; it was not written by torch.save of a state dict, or"
                " is damaged"
            )
        if len(self.stack) != 1 or self._marked:
            raise self.error("is malformed (its pickle ends with an open value)")
        if self._at != len(self._content):
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

    def text(self, size: int) -> None:
        text = str(self.take(self.unsigned(size)), "utf-8", "surrogatepass")
        if not text.isascii():
            # It may take four times as much as in the file.
            self._count(text)
        self.stack.append(text)

    def line(self) -> str:
        end = self._content.index(b"\n", self._at, self._at + 1000)
        return self.take(end + 1 - self._at)[:-1].decode()

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        values, self.stack = self.stack, self._marked.pop()
        return values

    def top(self, kind: type) -> Any:
        value = self.stack[-1]
        if type(value) is not kind:
            raise self.error(
                f"is malformed (a {kind.__name__} is expected, not a"
                f" {type(value).__name__})"
            )
        return value

    def set_items(self) -> None:
        items, self.stack = self.stack, self._marked.pop()
        keys = items[::2]
        for key in keys:
            kind = type(key)
            if kind is not str and kind is not Shell:
                self._check_key(key)
        self.top(dict).update(zip(keys, items[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self._check_key(key)
        self.top(dict)[key] = value

    def empty_set(self) -> None:
        self._num_sets += 1
        if self._num_sets > _MOST_SETS:
            raise self.error(f"has more than {_MOST_SETS} sets")
        self.push(set())

    def add_items(self) -> None:
        items = self._checked_keys(self.pop_to_mark())
        self.top(set).update(items)

    def append(self, items: list[Any]) -> None:
        self.top(list).extend(items)

    def frozen(self) -> None:
        self.push(frozenset(self._checked_keys(self.pop_to_mark())))

    def pair(self) -> None:
        second = self.stack.pop()
        self.stack[-1] = (self.stack[-1], second)

    def tuple_of(self, size: int) -> None:
        stack = self.stack
        if len(stack) < size:
            raise self.error("is malformed (a value is missing)")
        stack[-size:] = [tuple(stack[-size:])]

    def _checked_keys(self, keys: list[Any]) -> list[Any]:
        for key in keys:
            self._check_key(key)
        return keys

    def _check_key(self, key: Any) -> None:
        problem = self._keys.problem(key)
        if problem is not None:
            raise self.error(problem)

    def put(self, number: int) -> None:
        value, memo = self.stack[-1], self._memo
        if number == len(memo):
            memo.append(value)
        elif number < len(memo):
            memo[number] = value
        else:
            # Python's pickler counts; a list up to any number would fill memory.
            raise self.error(f"keeps a value as number {number}, not {len(memo)}")

    def global_(self, module: Any, name: Any) -> None:
        full = f"{module} {name}"
        if full not in self._names:
            raise self.error(
                f"names {module}.{name}, which is not among the names that are read"
                " (nothing was imported or called)",
                "if you trust the file, load it where it was written, and save a state"
                " dict of only tensors, numbers, texts, lists and dicts",
            )
        self.push(self._names[full])

    def stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise self.error("is malformed (a name is no text)")
        self.global_(module, name)

    def call(self) -> None:
        arguments, callee = self.stack.pop(), self.stack.pop()
        if type(callee) is not Call:
            raise self.error(f"calls a {type(callee).__name__}, which is no function")
        if type(arguments) is not tuple:
            raise self.error("is malformed (arguments are no tuple)")
        for each in arguments:
            if getsizeof(each) > _SMALL_BYTES:
                self._count(each)
        try:
            value = callee.function(*arguments)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.error(f"has an invalid {callee.name} ({error})") from None
        if arguments and getsizeof(value) > _SMALL_BYTES:
            self._count(value)
        self.stack.append(value)

    def call_with_keywords(self) -> None:
        if self.pop():
            raise self.error("is malformed (a call has keywords)")
        self.call()

    def build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if type(value) is Shell:
            value.state = state
        elif isinstance(value, Record):
            if getsizeof(state) > _SMALL_BYTES:
                self._count(state)
            value.update(state if type(state) is dict else {"state": state})
        # Attributes of dicts (`_metadata` of a state dict) are no values.
        elif not isinstance(value, dict):
            raise self.error("sets attributes of something that has none")

    def _count(self, copied: Any) -> None:
        # Without the parts, which are not copied.
        self._copied_bytes += getsizeof(copied)
        if self._copied_bytes > MOST_COPIED_BYTES:
            raise self.error(
                f"has calls that copy more than {MOST_COPIED_BYTES} bytes, or texts"
                " that take so much; it was made to exhaust memory"
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


_OPERATIONS: dict[int, Callable[[_Decoder], object]] = {
    ord(opcode): operation
    for opcode, operation in {
        "\x80": _Decoder.protocol,
        # A frame only helps to read ahead.
        "\x95": lambda d: d.take(8),
        "0": lambda d: d.pop(),
        "1": lambda d: d.pop_to_mark(),
        "N": lambda d: d.stack.append(None),
        "\x88": lambda d: d.stack.append(True),
        "\x89": lambda d: d.stack.append(False),
        "J": lambda d: d.stack.append(d.number("<i")),
        "M": lambda d: d.stack.append(d.unsigned(2)),
        "\x8a": _long,
        "G": lambda d: d.stack.append(d.number(">d")),
        "X": lambda d: d.text(4),
        "\x8d": lambda d: d.text(8),
        "B": lambda d: d.stack.append(d.take(d.unsigned(4))),
        "C": lambda d: d.stack.append(d.take(d.unsigned(1))),
        "\x8e": lambda d: d.stack.append(d.take(d.unsigned(8))),
        "]": lambda d: d.stack.append([]),
        "\x8f": _Decoder.empty_set,
        "t": lambda d: d.push(tuple(d.pop_to_mark())),
        "\x86": _Decoder.pair,
        "\x87": lambda d: d.tuple_of(3),
        "\x91": _Decoder.frozen,
        "\x90": _Decoder.add_items,
        "a": lambda d: d.append([d.pop()]),
        "e": lambda d: d.append(d.pop_to_mark()),
        "s": _Decoder.set_item,
        "u": _Decoder.set_items,
        "q": lambda d: d.put(d.unsigned(1)),
        "r": lambda d: d.put(d.unsigned(4)),
        "c": lambda d: d.global_(d.line(), d.line()),
        "\x93": _Decoder.stack_global,
        "R": _Decoder.call,
        "\x81": _Decoder.call,
        "\x92": _Decoder.call_with_keywords,
        "b": _Decoder.build,
        "Q": _Decoder.persistent_id,
    }.items()
}
