"""Steps uploaded by several hosts, without Orbax and without devices."""

import numpy as np

from elastic_ckpt.core import boxes, digest
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.persistent import upload

RUN = "run-7"
# Arrays with the shapes of their chunks, ordered by path.
ARRAYS = {
    "state/params/b": ((6,), (6,)),
    "state/params/w": ((8, 6), (2, 3)),
    "state/step": ((), ()),
}
COMPONENT = {"data/shards-00000-00001.json": b"first", "data/shards-00002.json": b"2nd"}
ORBAX_FILES = {
    "_CHECKPOINT_METADATA": b'{"commit_timestamp_nsecs": 1700000000000000000}',
    "metrics/metrics": b'{"loss": 1.5}',
}


def hosts(count):
    return [manifest.Host(id=f"m{n}.0", number=n, domains={}) for n in range(count)]


def saved_step(step=5, *, save="0"):
    leaves = [
        manifest.Leaf(path=path, shape=shape, dtype="float32", chunk=chunk)
        for path, (shape, chunk) in ARRAYS.items()
    ]
    leaves += [manifest.Leaf.of_file(path, len(COMPONENT[path])) for path in COMPONENT]
    contents = manifest.Contents(leaves=tuple(leaves), components=("data",))
    return upload.UploadedStep(run=RUN, step_id=StepId(step, save), contents=contents)


def items(saved):
    """All parts, as pairs of the number of a leaf and a box."""
    return [
        (number, box)
        for number, leaf in enumerate(saved.contents.leaves)
        for box in layout.cut(boxes.whole(leaf.shape), leaf.chunk)
    ]


def piece_of(saved, item, *, seed=0):
    """The values of a part."""
    leaf, box = saved.contents.leaves[item[0]], item[1]
    if leaf.is_file:
        return np.frombuffer(COMPONENT[leaf.path], np.uint8)
    values = np.random.default_rng([seed, item[0]]).random(leaf.shape, np.float32)
    return np.array(values[tuple(map(slice, box.start, box.stop))], order="C")


def put(ours, saved, item, *, seed=0):
    """A host writes one item of its upload, unless it is there already."""
    piece = piece_of(saved, item, seed=seed)
    part = (*item, digest.values_digest(piece))
    if part not in ours.there:
        ours.write([part], [piece])


def write(root, saved, host, share, *, seed=0, finish=True):
    """One host uploads some items."""
    ours = upload.Upload(root, saved, host)
    ours.begin()
    for item in share:
        put(ours, saved, item, seed=seed)
    if finish:
        ours.finish()


def write_all(root, saved, world, **options):
    """All hosts of `world` upload their shares, in turn."""
    for number, host in enumerate(world):
        write(root, saved, host, items(saved)[number :: len(world)], **options)


def commit_all(root, saved, **options):
    upload.commit(root, saved, hosts=(), orbax_files=ORBAX_FILES, **options)


def read(tier, saved, *, seed=0):
    """Reads all that a tier has of a step, and compares it with what was saved."""
    offered = tier.offers(saved.step_id.step)
    assert not offered.problems
    covered = set()
    for listed, source in offered.held:
        for number, box, _ in listed.rows():
            leaf = listed.contents.leaves[number]
            memory = bytearray(leaf.num_bytes(box))
            source.read_into(leaf, box, memoryview(memory))
            assert memory == piece_of(saved, (number, box), seed=seed).tobytes()
            covered.add((number, box))
    assert covered == set(items(saved))
