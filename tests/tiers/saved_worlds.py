"""Worlds that saved a step: hosts with devices, leaves under shardings, manifests."""

import hashlib
import itertools

import numpy as np
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, digest
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.step import StepId

RUN = "run-7"


def values(path, shape):
    """The values of a leaf: no two alike."""
    seed = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest())
    numbers = np.arange(np.prod(shape, dtype=int), dtype=np.float32)
    return (numbers + seed % 999).reshape(shape)


def grid(shape, parts):
    """The boxes of a regular grid, in C order; the parts of a dim may be unequal."""
    cuts = [
        [dim * n // count for n in range(count + 1)]
        for dim, count in zip(shape, parts, strict=True)
    ]
    return [
        boxes.Box(start=tuple(s for s, _ in cell), stop=tuple(s for _, s in cell))
        for cell in itertools.product(*map(itertools.pairwise, cuts))
    ]


def host(number, slices=1, hosts=1):
    """The `number`-th of some hosts, which are cut into equal runs, the slices."""
    domains = {"slice": f"s{number * slices // hosts}"}
    return manifest.Host(id=f"host-{number:02d}", number=number, domains=domains)


def contents(shapes, *, files=0):
    """Float32 leaves by path, and so many files of the component `data`."""
    leaves = [
        manifest.Leaf(
            path=path,
            shape=tuple(shape),
            dtype="float32",
            chunk=tuple(max(1, size) for size in shape),
        )
        for path, shape in sorted(shapes.items())
    ]
    names = [f"data/shard-{number:05d}.json" for number in range(files)]
    leaves += [manifest.Leaf.of_file(name, 150) for name in names]
    components = ("data",) if files else ()
    return manifest.Contents(leaves=tuple(leaves), components=components)


def file_of(whole, number):
    """One of the files, as a pair of the number of a leaf and a box."""
    return len(whole.arrays) + number, boxes.whole((150,))


def saved_by(
    host, whole, held, *, step=30, save="0", tier="local", run=RUN, values=values
):
    """The manifest of `host`; `held` are pairs of the number of a leaf and a box."""
    rows = []
    for leaf, box in held:
        part = values(whole.leaves[leaf].path, whole.leaves[leaf].shape)
        named = digest.values_digest(part[tuple(map(slice, box.start, box.stop))])
        rows.append((leaf, box, named))
    return manifest.Manifest(
        run=run,
        step_id=StepId(step, save),
        contents=whole,
        holders=(manifest.Holder(host, tier),),
        parts=manifest.Parts.of_rows(rows, whole),
    )


@st.composite
def saved(draw, *, most_hosts=8, step=30):
    """Manifests of all hosts of a step: every box is held, and every file."""
    slices = draw(st.integers(1, 4))
    hosts = slices * draw(st.integers(1, max(1, most_hosts // slices)))
    shapes = {
        "b": draw(st.lists(st.integers(1, 6), max_size=3)),
        "w": [draw(st.integers(1, 9)), draw(st.integers(1, 9))],
    }
    whole = contents(shapes, files=hosts)
    held = {number: [file_of(whole, number)] for number in range(hosts)}
    for leaf, saved_leaf in enumerate(whole.arrays):
        parts = [draw(st.integers(1, dim)) for dim in saved_leaf.shape]
        for box in grid(saved_leaf.shape, parts):
            some = st.sets(st.integers(0, hosts - 1), min_size=1, max_size=3)
            for number in draw(some):
                held[number].append((leaf, box))
    return [
        saved_by(host(number, slices, hosts), whole, held[number], step=step)
        for number in range(hosts)
    ]
