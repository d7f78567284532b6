"""Worlds that saved a step: hosts with devices, leaves under shardings, manifests."""

import hashlib

import numpy as np
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, digest
from elastic_ckpt.steps import holdings, manifest

RUN = "run-7"


def values(path, shape):
    """The values of a leaf: no two alike."""
    seed = int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest())
    return (
        np.arange(np.prod(shape, dtype=int), dtype=np.float32) + seed % 999
    ).reshape(shape)


def grid(shape, parts):
    """The boxes of a regular grid, in C order; the parts of a dim may be unequal."""
    cuts = [
        [dim * n // count for n in range(count + 1)]
        for dim, count in zip(shape, parts, strict=True)
    ]
    return [
        boxes.Box(
            start=tuple(c[n] for c, n in zip(cuts, at, strict=True)),
            stop=tuple(c[n + 1] for c, n in zip(cuts, at, strict=True)),
        )
        for at in np.ndindex(*parts)
    ]


def host(number, slices=1, hosts=1, **domains):
    """The `number`-th of some hosts, which are cut into equal runs, the slices."""
    of_slice = {"slice": f"s{number * slices // hosts}"}
    return manifest.Host(
        id=f"host-{number:02d}", number=number, domains=of_slice | domains
    )


def contents(shapes, **components):
    """Float32 leaves by path, and components by name."""
    leaves = tuple(
        manifest.Leaf(path=path, shape=tuple(shape), dtype="float32")
        for path, shape in sorted(shapes.items())
    )
    return manifest.Contents(leaves=leaves, components=components)


def offer(host, whole, held, *, step=30, save="0", tier="local", files=()):
    """The offer of `host`; `held` are pairs of the number of a leaf and a box."""
    fragments = []
    for number, (leaf, box) in enumerate(held):
        saved_leaf = whole.leaves[leaf]
        part = values(saved_leaf.path, saved_leaf.shape)[
            tuple(map(slice, box.start, box.stop))
        ]
        fragments.append(
            manifest.Fragment(
                leaf=leaf,
                box=box,
                digest=digest.values_digest(part),
                file=f"arrays/{host.id}.bin",
                offset=100 * number,
                stored_bytes=part.nbytes,
            )
        )
    return holdings.Offer(
        tier=tier,
        manifest=manifest.Manifest(
            run=RUN,
            step=step,
            save=save,
            host=host,
            contents=whole,
            fragments=manifest.Fragments.from_rows(fragments, contents=whole),
            component_files=tuple(files),
        ),
    )


def data_file(shard, last=None):
    """The file of the cursors of shards `shard` to `last`."""
    last = shard if last is None else last
    name = f"data/shards-{shard:05d}-{last:05d}.json"
    return manifest.ComponentFile(
        component="data/cursors",
        parts=(shard, last + 1),
        path=name,
        digest=digest.values_digest(np.frombuffer(name.encode(), np.uint8)),
        stored_bytes=150,
    )


@st.composite
def saved(draw, *, most_hosts=8, step=30, replicas=True):
    """Offers of all hosts of a step: every box is held, and every cursor."""
    slices = draw(st.integers(1, 4))
    hosts = slices * draw(st.integers(1, max(1, most_hosts // slices)))
    shapes = {
        "b": draw(st.lists(st.integers(1, 6), max_size=3)),
        "w": [draw(st.integers(1, 9)), draw(st.integers(1, 9))],
    }
    whole = contents(shapes, **{"data/cursors": hosts})
    held = {number: [] for number in range(hosts)}
    for leaf, saved_leaf in enumerate(whole.leaves):
        parts = [draw(st.integers(1, dim)) for dim in saved_leaf.shape]
        for box in grid(saved_leaf.shape, parts):
            some = st.sets(
                st.integers(0, hosts - 1),
                min_size=1,
                max_size=3 if replicas else 1,
            )
            for number in draw(some):
                held[number].append((leaf, box))
    return [
        offer(
            host(number, slices, hosts),
            whole,
            held[number],
            step=step,
            files=[data_file(number)],
        )
        for number in range(hosts)
    ]
