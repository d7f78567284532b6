"""Steps uploaded by several hosts, without Orbax and without devices."""

import numpy as np

from elastic_ckpt.core import boxes, digest
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import ocdbt, upload

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
    leaves = tuple(
        manifest.Leaf(path=path, shape=shape, dtype="float32")
        for path, shape in sorted(SHAPES.items())
    )
    return upload.UploadedStep(
        run=RUN,
        step_id=StepId(step, save),
        contents=manifest.Contents(leaves=leaves, components={"data": 3}),
        arrays={
            path: ocdbt.StoredArray(
                checkpointable="state",
                name=path.removeprefix("state/").replace("/", "."),
                chunk=chunk,
            )
            for path, chunk in CHUNKS.items()
        },
    )


def files():
    spans = [(0, 2), (2, 3)]
    return [
        manifest.ComponentFile(
            component="data",
            parts=parts,
            path=path,
            digest=digest.values_digest(np.frombuffer(content, np.uint8)),
            stored_bytes=len(content),
        )
        for parts, (path, content) in zip(spans, COMPONENT.items(), strict=True)
    ]


def items(saved):
    """All chunks, as pairs of the number of a leaf and a box, and all files."""
    chunks = [
        (number, box)
        for number, leaf in enumerate(saved.contents.leaves)
        for box in layout.cut(boxes.whole(leaf.shape), CHUNKS[leaf.path])
    ]
    return [*chunks, *files()]


def write(root, saved, host, part, *, seed=0, finish=True, **options):
    """One host uploads some items."""
    ours = upload.Upload(root, saved, host, **options)
    ours.begin()
    for item in part:
        put(ours, saved, item, seed=seed)
    return ours.finish() if finish else None


def put(ours, saved, item, *, seed=0):
    """A host writes one item of its upload."""
    if isinstance(item, manifest.ComponentFile):
        ours.write_file(item, COMPONENT[item.path])
        return
    leaf, box = item
    piece = piece_of(saved, item, seed=seed)
    ours.write_chunks([upload.Chunk(leaf, box, piece, digest.values_digest(piece))])


def piece_of(saved, item, *, seed=0):
    """The values of a chunk."""
    leaf, box = item
    whole = values(saved.contents.leaves[leaf].path, seed=seed)
    return np.array(whole[tuple(map(slice, box.start, box.stop))], order="C")


def write_all(root, saved, world, **options):
    """All hosts of `world` upload their shares, in turn."""
    for host in world:
        share = items(saved)[world.index(host) :: len(world)]
        write(root, saved, host, share, **options)


def commit_all(root, saved, world, **options):
    upload.commit(
        root,
        saved,
        hosts=[host.id for host in world],
        orbax_files={"_CHECKPOINT_METADATA": b'{"commit_timestamp_nsecs": 1000000}'},
        **options,
    )


def read(tier, step, *, seed=0):
    """Reads all that a tier has of a step, and compares it with what was saved."""
    offered = tier.offers(step)
    assert not offered.problems
    covered = 0
    for offer, source in offered.sources.items():
        held = offer.manifest
        for number in range(len(held.fragments)):
            fragment = held.fragments.row(number, contents=held.contents)
            memory = bytearray(fragment.stored_bytes)
            source.read_into(fragment.file, fragment.offset, memoryview(memory))
            whole = values(held.contents.leaves[fragment.leaf].path, seed=seed)
            box = tuple(map(slice, fragment.box.start, fragment.box.stop))
            assert bytes(memory) == whole[box].tobytes()
            covered += len(memory)
        for file in held.component_files:
            memory = bytearray(file.stored_bytes)
            source.read_into(file.path, 0, memoryview(memory))
            assert bytes(memory) == COMPONENT[file.path]
    assert covered == 4 * sum(int(np.prod(shape)) for shape in SHAPES.values())
