"""Steps uploaded by several hosts, without Orbax and without devices."""

import numpy as np

from elastic_ckpt.core import boxes, digest
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.persistent import upload

RUN = "run-7"
SHAPES = {"state/params/w": (8, 6), "state/params/b": (6,), "state/step": ()}
CHUNKS = {"state/params/w": (2, 3), "state/params/b": (6,), "state/step": ()}
COMPONENT = {"data/shards-00000-00001.json": b"first", "data/shards-00002.json": b"2nd"}


def hosts(count):
    return [
        manifest.Host(id=f"m{number}.0", number=number, domains={})
        for number in range(count)
    ]


def values(path, *, seed=0):
    """The values of a leaf, float32."""
    number = sorted(SHAPES).index(path)
    generator = np.random.default_rng([seed, number])
    return generator.random(SHAPES[path], np.float32)


def saved_step(step=5, *, save="0"):
    leaves = [
        manifest.Leaf(path=path, shape=shape, dtype="float32", chunk=CHUNKS[path])
        for path, shape in sorted(SHAPES.items())
    ]
    leaves += [
        manifest.Leaf.of_file(path, len(content)) for path, content in COMPONENT.items()
    ]
    return upload.UploadedStep(
        run=RUN,
        step_id=StepId(step, save),
        contents=manifest.Contents(leaves=tuple(leaves), components=("data",)),
    )


def items(saved):
    """All parts, as pairs of the number of a leaf and a box."""
    return [
        (number, box)
        for number, leaf in enumerate(saved.contents.leaves)
        for box in layout.cut(boxes.whole(leaf.shape), leaf.chunk)
    ]


def write(root, saved, host, share, *, seed=0, finish=True, **options):
    """One host uploads some items."""
    ours = upload.Upload(root, saved, host, **options)
    ours.begin()
    for item in share:
        if part(saved, item, seed=seed) not in ours.there:
            put(ours, saved, item, seed=seed)
    return ours.finish() if finish else None


def put(ours, saved, item, *, seed=0):
    """A host writes one item of its upload."""
    ours.write([part(saved, item, seed=seed)], [piece_of(saved, item, seed=seed)])


def piece_of(saved, item, *, seed=0):
    """The values of a part."""
    leaf, box = saved.contents.leaves[item[0]], item[1]
    whole = (
        np.frombuffer(COMPONENT[leaf.path], np.uint8)
        if leaf.is_file
        else values(leaf.path, seed=seed)
    )
    return np.array(whole[tuple(map(slice, box.start, box.stop))], order="C")


def part(saved, item, *, seed=0):
    """An item with its digest."""
    return upload.Part(*item, digest.values_digest(piece_of(saved, item, seed=seed)))


def write_all(root, saved, world, **options):
    """All hosts of `world` upload their shares, in turn."""
    for host in world:
        share = items(saved)[world.index(host) :: len(world)]
        write(root, saved, host, share, **options)


def commit_all(root, saved, **options):
    upload.commit(
        root,
        saved,
        hosts=(),
        orbax_files={"_CHECKPOINT_METADATA": b'{"commit_timestamp_nsecs": 1000000}'},
        **options,
    )


def read(tier, step, *, seed=0):
    """Reads all that a tier has of a step, and compares it with what was saved."""
    offered = tier.offers(step)
    assert not offered.problems
    covered = 0
    for held, source in offered.copies:
        for number, box, _ in held.rows():
            leaf = held.contents.leaves[number]
            memory = bytearray(leaf.num_bytes(box))
            source.read_into(leaf, box, memoryview(memory))
            if leaf.is_file:
                assert bytes(memory) == COMPONENT[leaf.path]
                continue
            whole = values(leaf.path, seed=seed)
            assert (
                bytes(memory) == whole[tuple(map(slice, box.start, box.stop))].tobytes()
            )
            covered += len(memory)
    assert covered == 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
