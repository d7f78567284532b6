"""Random rules, shapes and meshes: what is read is what NumPy makes."""

import collections
import contextlib
import itertools
import json

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import boxes
from elastic_ckpt.universal.formats import checkpoint as stored
from elastic_ckpt.universal.plan import load_plan
from elastic_ckpt.universal.reading.transfer import Transfer
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.strides import row_major
from tests.universal.rules.relayout import saved, targets_like
from tests.universal.rules.test_random_layouts import arrays_of, layout_of, relations


class Memory:
    """The bytes of files; a `byte_source.ByteSource`."""

    def __init__(self):
        self.files = collections.defaultdict(bytearray)

    def add(self, draw, tensor):
        """The stored tensor of `Saved` values, cut into fragments of several files."""
        values = np.ascontiguousarray(tensor.values).reshape(tensor.values.shape)
        fragments = []
        bounds = [[0, size] for size in values.shape]
        for of_dim, size in zip(bounds, values.shape, strict=True):
            if size > 1 and draw(st.booleans()):
                of_dim.insert(1, draw(st.integers(1, size - 1)))
        for ends in itertools.product(*(itertools.pairwise(each) for each in bounds)):
            part = np.ascontiguousarray(values[tuple(slice(*each) for each in ends)])
            file = draw(st.sampled_from(["a", "b", "c"]))
            content = self.files[file]
            content += bytes(draw(st.sampled_from([0, 8, 64])))
            offset = len(content)
            content += part.tobytes()
            start = tuple(a for a, _ in ends)
            box = boxes.Box(start=start, stop=tuple(b for _, b in ends))
            fragments.append(
                stored.Fragment(
                    box=box,
                    file=file,
                    offset=offset,
                    strides=row_major(box.shape, values.itemsize),
                )
            )
        return stored.StoredTensor(
            name=tensor.name,
            dtype=values.dtype,
            shape=values.shape,
            ranks=tensor.ranks,
            kind=tensor.kind,
            fragments=tuple(fragments) if values.size else (),
        )

    def range_of(self, _file, start, stop):
        return start, stop

    def request_bytes(self, _file, num_bytes, *, is_direct):
        return 0 if is_direct else num_bytes

    def read_into(self, file, start, parts):
        done = start
        for part in parts:
            part[:] = np.frombuffer(
                self.files[file][done : done + part.nbytes], np.uint8
            )
            done += part.nbytes
        return done - start

    def close(self):
        pass


def read(draw, made_by, tensors, expected, axes=None):
    """Reads the targets in parts of a random mesh, and compares each."""
    memory = Memory()
    held = [memory.add(draw, each) for each in tensors]
    matched = matching.moves(made_by, held, axes or {}, targets_like(expected))
    needed = {}
    for target in matched.targets.values():
        parts = []
        for size in target.shape:
            divisors = [n for n in range(1, size + 1) if size % n == 0] or [1]
            length = size // draw(st.sampled_from(divisors)) if size else 0
            parts.append([(at, at + length) for at in range(0, size, length or 1)])
        grid = [
            boxes.Box(start=tuple(a for a, _ in each), stop=tuple(b for _, b in each))
            for each in itertools.product(*parts)
        ]
        needed[target] = [box for box in grid if draw(st.booleans())]
    plan = load_plan.plan(held, matched.moves, matched.fills, needed)
    transfer = Transfer(
        plan,
        lambda _: memory,
        budget_bytes=draw(st.sampled_from([1, 2**20])),
        is_staged=lambda _: True,
    )
    seen = set()
    with contextlib.closing(transfer.buffers()) as buffers:
        for number, values in buffers:
            buffer = plan.buffers[number]
            place = tuple(map(slice, buffer.box.start, buffer.box.stop))
            wanted = expected[buffer.tensor.name][place]
            assert values.tobytes() == wanted.tobytes(), buffer
            seen.add((buffer.tensor.name, buffer.box))
            del values
            transfer.free(number)
    assert seen == {
        (target.name, box)
        for target, of_it in needed.items()
        for box in of_it
        if box.volume
    }


def rule(source, target, **options):
    rules = [{"from": source, "to": target, **options}]
    return Layout.parse(json.dumps({"version": 1, "rules": rules}))


def numbers(draw, shape, dtype=np.float32):
    seed = draw(st.integers(0, 2**32 - 1))
    values = np.random.default_rng(seed).integers(-8, 9, shape)
    return values.astype(dtype)


def moved(relation):
    """Tensors of ranks, grouped, split and fused at random."""
    values_of, sizes, both = relation
    tensors = [
        saved(name, values, **ranks)
        for each in both[0]
        for name, values, ranks in each.arrays(values_of, True)
    ]
    axes = {axis: count for each in both[0] for axis, count in each.axes.items()}
    return (
        layout_of(sizes, both, ranked=True),
        tensors,
        arrays_of(both[1], values_of),
        axes,
    )


def repeated(draw):
    """A tensor whose elements are repeated along a new dim, or replicas of ranks."""
    kv, d, embed, rep = (draw(st.integers(1, 4)) for _ in range(4))
    values = numbers(draw, (kv * d, embed))
    ranks = draw(st.integers(1, 3))
    option = draw(st.sampled_from(["replicated", "unchecked"]))
    made_by = rule(
        {"w": {"dims": "(kv d) embed", option: ["dp"]}},
        {"w": {"dims": "embed (kv rep d)", "replicated": ["rep"]}},
        sizes={"kv": kv, "rep": rep},
    )
    expected = np.repeat(values.reshape(kv, 1, d, embed), rep, 1)
    expected = {"w": expected.transpose(3, 0, 1, 2).reshape(embed, -1)}
    tensors = [saved("w", values, dp=n) for n in range(ranks)]
    return made_by, tensors, expected, {"dp": ranks}


def scaled(draw):
    """A weight in blocks, with a scale for each."""
    out, inner, o, i = (draw(st.integers(1, 7)) for _ in range(4))
    dtype = np.dtype(draw(st.sampled_from([ml_dtypes.float8_e4m3fn, np.int8])))
    weight = numbers(draw, (out, inner), dtype)
    scales = numbers(draw, (-(-out // o), -(-inner // i)))
    made_by = rule(
        {"w": {"dims": "(ob o)~ (ib i)~", "times": {"s": "ob ib"}}},
        {"w": {"dims": "(ib i)~ (ob o)~", "dtype": "float32"}},
        sizes={"o": o, "i": i},
    )
    whole = np.repeat(np.repeat(scales, o, 0), i, 1)[:out, :inner]
    expected = {"w": (weight.astype(np.float32) * whole).T}
    return made_by, [saved("w", weight), saved("s", scales)], expected, {}


def halved(draw):
    """Numbers of four bits, two in a byte, with a scale for each group."""
    out, groups, half = (draw(st.integers(1, 4)) for _ in range(3))
    blocks = numbers(draw, (out, groups, half), np.int8).view(np.uint8)
    scales = (numbers(draw, (out, groups), np.int16) + 127).astype(np.uint8)
    with_scales = {"times": {"s": {"dims": "out g", "as": "float8_e8m0fnu"}}}
    made_by = rule(
        {"w": {"dims": "out g k", "as": "float4_e2m1fn", **with_scales}},
        {"w": {"dims": "(g k) out", "dtype": "float32"}},
    )
    parts = [each.view(ml_dtypes.float4_e2m1fn) for each in (blocks & 15, blocks >> 4)]
    values = np.stack([each.astype(np.float32) for each in parts], -1)
    values = (
        values.reshape(out, groups, -1)
        * np.exp2(scales.astype(np.float32) - 127)[..., None]
    )
    expected = {"w": np.ascontiguousarray(values.reshape(out, -1).T)}
    return made_by, [saved("w", blocks), saved("s", scales)], expected, {}


def added(draw):
    """A weight and the product of two small matrices."""
    out, inner, rank = (draw(st.integers(1, 5)) for _ in range(3))
    weight, b, a = (
        numbers(draw, shape) for shape in ((out, inner), (out, rank), (rank, inner))
    )
    made_by = rule(
        {
            "w": {
                "dims": "out in",
                "plus": {"b": {"dims": "out r", "scale": 2}, "a": "r in"},
            }
        },
        {"w": "in out"},
    )
    expected = {"w": (weight + 2 * b @ a).T}
    return made_by, [saved("w", weight), saved("b", b), saved("a", a)], expected, {}


def alternating(draw):
    """Layers of two kinds by turns, the last turn cut short."""
    one, other = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    count = draw(st.integers(one + other, 9))
    layers = [numbers(draw, (3,)) for _ in range(count)]
    made_by = rule(
        {"{(block (one + other))~}.w": "x"},
        {"one": "x (block one)~", "other": "(block other)~ x"},
        sizes={"one": one, "other": other},
    )
    kinds = [n % (one + other) < one for n in range(count)]
    expected = {
        "one": np.stack(
            [v for v, is_one in zip(layers, kinds, strict=True) if is_one], 1
        ),
        "other": np.stack(
            [v for v, is_one in zip(layers, kinds, strict=True) if not is_one]
        ),
    }
    return (
        made_by,
        [saved(f"{n}.w", each) for n, each in enumerate(layers)],
        expected,
        {},
    )


KINDS = [repeated, scaled, halved, added, alternating]


@st.composite
def cases(draw):
    if draw(st.booleans()):
        return moved(draw(relations()))
    return draw(st.sampled_from(KINDS))(draw)


@settings(max_examples=50)
@given(st.data())
def test_what_is_read_is_what_numpy_makes(data):
    made_by, tensors, expected, axes = data.draw(cases())
    read(data.draw, made_by, tensors, expected, axes)
