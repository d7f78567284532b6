"""What a checkpoint has, by patterns of names; and a first draft of a layout.

Tensors whose names differ in numbers alone, and which have one shape and dtype, are a
*family*. A draft pairs the families of a checkpoint with those of a tree: by the words
of their names, and by shapes that hold the same elements in another order.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.relation import DTYPES
from elastic_ckpt.universal.stored import StoredTensor

_NUMBER = re.compile(r"(?<![0-9A-Za-z])(?:0|[1-9][0-9]{0,17})(?![0-9A-Za-z])")
_WORD = re.compile(r"[A-Z]?[a-z]+[0-9]*|[A-Z]+|[0-9]+")
# Words that programs have for one thing.
_SYNONYMS = {
    word: words[0]
    for words in (
        ("query", "q"),
        ("key", "k"),
        ("value", "v"),
        ("out", "o", "output", "proj", "projection"),
        ("attention", "attn", "self"),
        ("mlp", "ffn", "feed", "forward", "ff"),
        ("norm", "layernorm", "ln", "layer_norm", "rmsnorm"),
        ("embed", "embedding", "embeddings", "wte", "emb", "embedder", "tok"),
        ("head", "lm", "logits"),
        ("layer", "layers", "h", "blocks", "block"),
        ("expert", "experts", "moe"),
        ("gate", "wi0", "w1"),
        ("down", "wo", "w2", "fc2"),
        ("up", "wi1", "w3", "fc1"),
        ("router", "gating"),
    )
    for word in words
}
# Words that say nothing about a tensor, and words of many of them.
_EMPTY_WORDS = {"weight", "kernel", "w", "model", "params"}
_COMMON_WORDS = {"layer", "attention", "mlp", "out"}
_SEVERAL_WORDS = {"qkv": ("query", "key", "value"), "kv": ("key", "value")}
_LEAST_LIKENESS = 0.25
# A leaf that is less like a tensor than another one, by this factor, may be meant.
_LIKE = 0.6
_MOST_DIMS = 6
# The leaves that may be parts of a fused one.
_MOST_FUSED = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Tensors whose names differ in numbers alone.

    Attributes:
      parts: of their names, between the numbers.
      numbers: the values that occur, by place in the name.
      names: all names.
      shape: of each.
      dtype: of each.
      kind: of each, see `StoredTensor`.
    """

    parts: tuple[str, ...]
    numbers: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: str = "parameter"

    @property
    def num_bytes(self) -> int:
        """The bytes of all values."""
        return len(self.names) * math.prod(self.shape) * self.dtype.itemsize

    @property
    def text(self) -> str:
        """The names, as `layers.{0-31}.weight`; without control characters."""
        text = self._joined([f"{{{_ranges(each)}}}" for each in self.numbers])
        return text if text.isprintable() else ascii(text)

    def pattern(self, captures: Sequence[str]) -> str:
        """A name pattern with these captures."""
        return self._joined([f"{{{name}}}" for name in captures], is_pattern=True)

    def _joined(self, between: Sequence[str], *, is_pattern: bool = False) -> str:
        parts = self.parts
        if is_pattern:
            parts = tuple(map(name_pattern.pattern_of, parts))
        return parts[0] + "".join(
            a + b for a, b in zip(between, parts[1:], strict=True)
        )


def families(tensors: Sequence[StoredTensor | TargetTensor]) -> list[Family]:
    """The families of tensors, in the order of their first ones."""
    groups: dict[object, list[str]] = {}
    unboxed = name_pattern.unboxed(tensor.name for tensor in tensors)
    for tensor in tensors:
        name = unboxed.get(tensor.name, tensor.name)
        key = (
            tuple(_NUMBER.split(name)),
            tensor.shape,
            tensor.dtype,
            getattr(tensor, "kind", "parameter"),
        )
        groups.setdefault(key, []).append(name)
    found = []
    for (parts, shape, dtype, kind), names in groups.items():  # type: ignore[misc]
        columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
        kept, numbers = [parts[0]], []
        for column, part in zip(columns, parts[1:], strict=False):
            if len(set(column)) == 1:
                # The only number is a part of the name.
                kept[-1] += column[0] + part
            else:
                kept.append(part)
                numbers.append(tuple(sorted(set(map(int, column)))))
        found.append(
            Family(
                parts=tuple(kept),
                numbers=tuple(numbers),
                names=tuple(dict.fromkeys(names)),
                shape=shape,
                dtype=dtype,
                kind=kind,
            )
        )
    return found


def tree(path: str) -> dict[str, TargetTensor]:
    """The tensors of a tree that a draft leads to.

    Args:
      path: of a checkpoint of any format that is read, or of a JSON file of shapes by
        name, `{"embed/kernel": [8, 4]}`, which have float32, or `{"shape": [8, 4],
        "dtype": "bfloat16"}`.

    Raises:
      LayoutError: if the JSON file is missing, or has something else.
      FormatError: as `open_checkpoint`.
    """
    if not path.endswith(".json"):
        tensors = opening.open_checkpoint(path).tensors
        return {
            each.name: TargetTensor(name=each.name, dtype=each.dtype, shape=each.shape)
            for each in tensors
        }
    try:
        listed = json.loads(epath.Path(path).read_text())
        made = {}
        for name, given in listed.items():
            each = given if isinstance(given, dict) else {"shape": given}
            dtype, shape = each.get("dtype", "float32"), each["shape"]
            if dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{name!r} has {given!r}")
            made[name] = TargetTensor(
                name=name, dtype=np.dtype(dtype), shape=tuple(shape)
            )
        return made
    except OSError as error:
        raise LayoutError(f"{path} cannot be read ({error}); check the path") from None
    except (
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        RecursionError,
    ) as error:
        raise LayoutError(
            f'{path} is no JSON of shapes by name, such as {{"embed/kernel": [8, 4],'
            f' "head": {{"shape": [4], "dtype": "bfloat16"}}}}: {error}'
        ) from None


def draft(stored: Sequence[StoredTensor], targets: Mapping[str, TargetTensor]) -> str:
    """A layout file from tensors to targets, with what has to be checked or written.

    Args:
      stored: the tensors of the checkpoint.
      targets: the tensors of the tree.
    """
    sources, wanted = families(stored), families(list(targets.values()))
    pairs: list[tuple[float, int, int, str]] = []
    for at, source in enumerate(sources):
        for to, target in enumerate(wanted):
            likeness = _likeness(source, target)
            rule = _rule(source, target)
            if rule is not None and likeness >= _LEAST_LIKENESS:
                pairs.append((likeness, at, to, rule))
    taken: set[int] = set()
    made: dict[int, str] = {}
    for likeness, at, to, rule in sorted(pairs, key=lambda each: (-each[0], each[1:3])):
        if at not in made and to not in taken:
            others = [
                wanted[each].text
                for other, source, each, _ in pairs
                if source == at and each != to and other >= _LIKE * likeness
            ]
            made[at] = rule
            if others:
                made[at] = f"  # Or to {errors.first_of(others)}:\n{rule}"
            taken.add(to)
    _pair_by_shape(sources, wanted, made, taken)
    left = [each for to, each in enumerate(wanted) if to not in taken]
    lines = ["version: 1", "rules:"]
    for at, source in enumerate(sources):
        if at in made:
            lines.append(made[at])
            continue
        fused = _fused(source, left)
        if fused is None:
            lines.append(f"  # No leaf fits {_described(source)}")
            continue
        rule, parts = fused
        lines.append(rule)
        left = [each for each in left if each not in parts]
    lines += [f"  # No tensor fits {_described(each)}" for each in left]
    return "\n".join(lines) + "\n"


def _pair_by_shape(
    sources: Sequence[Family],
    wanted: Sequence[Family],
    made: dict[int, str],
    taken: set[int],
) -> None:
    # Pairs those that are left over and fit nothing else.
    fitting = [
        (at, to, rule)
        for at, source in enumerate(sources)
        for to, target in enumerate(wanted)
        if (rule := _rule(source, target)) is not None
    ]
    for at, to, rule in fitting:
        if (
            at not in made
            and to not in taken
            and sum(at == other for other, _, _ in fitting) == 1
            and (sum(to == other for _, other, _ in fitting) == 1)
        ):
            made[at] = f"  # By its shape alone:\n{rule}"
            taken.add(to)


def _described(family: Family) -> str:
    return f"{family.text} {list(family.shape)} {family.dtype.name}"


def _ranges(numbers: Sequence[int]) -> str:
    runs = []
    for _, run in itertools.groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        listed = [number for _, number in run]
        runs.append(f"{listed[0]}-{listed[-1]}" if len(listed) > 1 else str(listed[0]))
    return ",".join(runs)


def _words(family: Family) -> set[str]:
    found = [word.lower() for part in family.parts for word in _WORD.findall(part)]
    words = [each for word in found for each in _SEVERAL_WORDS.get(word, (word,))]
    return {_SYNONYMS.get(word, word) for word in words} - _EMPTY_WORDS


def _likeness(source: Family, target: Family) -> float:
    one, other = _words(source), _words(target)
    weights = {word: 0.3 if word in _COMMON_WORDS else 1 for word in one | other}
    shared = sum(weights[word] for word in one & other)
    return shared / max(1, sum(weights.values()))


def _rule(source: Family, target: Family) -> str | None:
    # The rule of two families; None if their shapes have other elements.
    kept: dict[int, int] = {}
    for at, numbers in enumerate(source.numbers):
        for to, others in enumerate(target.numbers):
            if numbers == others and to not in kept.values() and at not in kept:
                kept[at] = to
    names = [f"n{at}" for at in range(len(source.numbers))]
    stacked = [at for at in range(len(source.numbers)) if at not in kept]
    unstacked = [to for to in range(len(target.numbers)) if to not in kept.values()]
    counts = [len(source.numbers[at]) for at in stacked]
    to_counts = [len(target.numbers[to]) for to in unstacked]
    places = [
        *(source.numbers[at] for at in stacked),
        *(target.numbers[to] for to in unstacked),
    ]
    if any(each[-1] - each[0] + 1 != len(each) for each in places):
        return None
    regrouped = _regrouped([*counts, *source.shape], [*to_counts, *target.shape])
    if regrouped is None:
        return None
    from_dims, to_dims, sizes, ways = regrouped
    for at, dim in zip(stacked, from_dims, strict=False):
        names[at] = _counted(dim, source.numbers[at])
    to_names = {to: names[at] for at, to in kept.items()}
    for to, dim in zip(unstacked, to_dims, strict=False):
        to_names[to] = _counted(dim, target.numbers[to])
    return _written(
        {source.pattern(names): from_dims[len(counts) :]},
        {
            target.pattern([to_names[to] for to in range(len(target.numbers))]):
                to_dims[len(to_counts) :]
        },
        sizes,
        f"{ways} orders of dims fit: check which is which" * (ways > 1),
    )  # fmt: skip


def _counted(dim: str, numbers: Sequence[int]) -> str:
    # The capture of a dim whose numbers may begin after 0.
    return f"{dim}+{numbers[0]}" if numbers[0] else dim


def _fused(
    source: Family, left: Sequence[Family]
) -> tuple[str, Sequence[Family]] | None:
    # A rule of a matrix that has the rows, or columns, of several leaves.
    if len(source.shape) > 2 or not source.shape:
        return None
    words = _words(source)
    order = sorted(left, key=lambda each: -len(words & _words(each)))[:_MOST_FUSED]
    for count in (3, 2):
        for parts in itertools.combinations(order, count):
            if not all(words & _words(part) for part in parts):
                continue
            for dim in range(len(source.shape)):
                rule = _fused_along(dim, source, parts)
                if rule is not None:
                    return rule, parts
    return None


def _fused_along(dim: int, source: Family, parts: Sequence[Family]) -> str | None:
    # Leaves have the numbers of the matrix in their names, or are stacks of them.
    is_stacked = all(not part.numbers for part in parts) and len(source.numbers) == 1
    if not is_stacked and any(part.numbers != source.numbers for part in parts):
        return None
    stack = [len(source.numbers[0])] if is_stacked else []
    rest = source.shape[:dim] + source.shape[dim + 1 :]
    each_row = max(1, math.prod([*stack, *rest]))
    lengths = [math.prod(part.shape) // each_row for part in parts]
    if sum(lengths) != source.shape[dim]:
        return None
    listed = [
        _regrouped([*stack, length, *rest], list(part.shape), prefix=f"p{n}")
        for n, (length, part) in enumerate(zip(lengths, parts, strict=True))
    ]
    if any(each is None for each in listed):
        return None
    made = [each for each in listed if each is not None]
    at = len(stack)
    shared = [*made[0][0][:at], *made[0][0][at + 1 :]]
    addends = [from_dims[at].strip("()") for from_dims, _, _, _ in made]
    others = [[*held[:at], *held[at + 1 :]] for held, _, _, _ in made]
    if len({re.sub(r"\w+", "", " ".join(each)) for each in others}) > 1:
        return None
    dims = [f"({' + '.join(addends)})", *shared[at:]]
    dims = dims[1:] + dims[:1] if dim else dims
    names = shared[:at] if is_stacked else [f"n{n}" for n in range(len(source.numbers))]
    to: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for part, (from_dims, to_dims, held, _), length, addend in zip(
        parts, made, lengths, addends, strict=True
    ):
        others = [*from_dims[:at], *from_dims[at + 1 :]]
        to[part.pattern(names if part.numbers else [])] = [
            _renamed(each, others, shared) for each in to_dims
        ]
        sizes |= {_renamed(name, others, shared): size for name, size in held.items()}
        if " " not in addend:
            sizes[addend] = length
    note = "check the order of the parts"
    if max(ways for _, _, _, ways in made) > 1:
        note += ", and of their dims"
    return _written({source.pattern(names): dims}, to, sizes, note)


def _renamed(text: str, names: Sequence[str], others: Sequence[str]) -> str:
    words, new = (re.findall(r"\w+", " ".join(each)) for each in (names, others))
    replaced = dict(zip(words, new, strict=False))
    return re.sub(r"\w+", lambda found: replaced.get(found[0], found[0]), text)


def _regrouped(
    source: Sequence[int], target: Sequence[int], prefix: str = ""
) -> tuple[list[str], list[str], dict[str, int], int] | None:
    # The dims of both sides, in the order of the source with the fewest exchanges, the
    # sizes that shapes do not tell, and the number of orders that fit as well.
    if math.prod(source) != math.prod(target) or not math.prod(source):
        return None
    if max(len(source), len(target)) > _MOST_DIMS:
        return None
    best: tuple[tuple[int, int], list[tuple[int, int, int]], Sequence[int]] | None
    best = None
    found = collections.Counter[int]()
    for order in itertools.permutations(range(len(source))):
        factors = _common([source[dim] for dim in order], target)
        if factors is None:
            continue
        exchanges = sum(a > b for a, b in itertools.combinations(order, 2))
        cost = (len(factors), exchanges)
        found[len(factors)] += 1
        if best is None or cost < best[0]:
            best = cost, factors, order
    if best is None:
        return None
    _, factors, order = best
    names: list[str] = []
    for size, _, _ in factors:
        name = f"{prefix}d{size}"
        names.append(name + "abcdefgh"[sum(n.startswith(name) for n in names)] * (
            sum(s == size for s, _, _ in factors) > 1))  # fmt: skip
    from_dims = [""] * len(source)
    for dim, original in enumerate(order):
        from_dims[original] = _product(
            [n for n, (_, at, _) in zip(names, factors, strict=True) if at == dim]
        )
    to_dims = [
        _product([n for n, (_, _, to) in zip(names, factors, strict=True) if to == dim])
        for dim in range(len(target))
    ]
    split = [each for each in (*from_dims, *to_dims) if " " in each]
    sizes = {
        name: size
        for name, (size, _, _) in zip(names, factors, strict=True)
        if any(name in each for each in split)
    }
    return from_dims, to_dims, sizes, found[len(factors)]


def _common(
    one: Sequence[int], other: Sequence[int]
) -> list[tuple[int, int, int]] | None:
    # The factors that both have in row-major order: their size, and the dim of either.
    factors = []
    left, right = list(one), list(other)
    at = to = 0
    while at < len(left) or to < len(right):
        a = left[at] if at < len(left) else 1
        b = right[to] if to < len(right) else 1
        size = min(a, b)
        if a == 1 or b == 1:
            size = 1
            at, to = at + (a == 1 and at < len(left)), to + (b == 1 and to < len(right))
            continue
        if a % size or b % size:
            return None
        factors.append((size, at, to))
        left[at], right[to] = a // size, b // size
        at, to = at + (left[at] == 1), to + (right[to] == 1)
    return factors


def _product(names: Sequence[str]) -> str:
    return f"({' '.join(names)})" if len(names) > 1 else (*names, "1")[0]


def _written(
    source: Mapping[str, Sequence[str]],
    target: Mapping[str, Sequence[str]],
    sizes: Mapping[str, int],
    note: str,
) -> str:
    def side(tensors: Mapping[str, Sequence[str]]) -> Iterator[str]:
        for name, dims in tensors.items():
            yield f"{json.dumps(name)}: {json.dumps(' '.join(dims))}"

    lines = [f"  - from: {{{', '.join(side(source))}}}"]
    if note:
        lines[0] += f"  # {note}"
    lines.append(f"    to: {{{', '.join(side(target))}}}")
    if sizes:
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        lines.append(f"    sizes: {{{listed}}}")
    return "\n".join(lines)
