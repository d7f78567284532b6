"""Steps as the persistent tier writes them of pytrees, without Orbax."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint import orbax_format
from elastic_ckpt.core import boxes, digest
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.persistent import upload

RUN = "run-7"
CURSOR = b'{"cursor": 7}'


def state(mesh):
    """A state with leaves of all kinds; arrays lie over a mesh of two axes."""

    def over(value, *spec):
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))

    first, second = mesh.axis_names
    generator = np.random.default_rng(7)
    return {
        "params": {
            "w": over(generator.random((8, 16), np.float32), first, second),
            "b": over(jnp.arange(16, dtype=jnp.bfloat16), second),
            "zeros": over(jnp.zeros((8, 8)), first),
        },
        "opt": (over(jnp.int32(3)), [None, np.arange(5.0)], {}),
        "key": over(jax.random.key(3)),
        "step": 12,
        "rate": 0.1,
    }


def data(leaf):
    """The values of a leaf as they are stored."""
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def chunk_shape(leaf):
    """A chunk is a shard, or half of it."""
    array = data(leaf)
    shard = array.shape
    if isinstance(leaf, jax.Array) and leaf.ndim == array.ndim:
        shard = leaf.sharding.shard_shape(leaf.shape)
    most = max(1, array.dtype.itemsize * int(np.prod(shard)) // 2)
    return layout.chunk_shape(shard, item_bytes=array.dtype.itemsize, chunk_bytes=most)


def leaves(trees):
    """The leaves of some checkpointables by their paths in manifests, ordered."""
    by_path = {
        orbax_format.leaf_path(name, path): leaf
        for name, tree in trees.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    return dict(sorted(by_path.items()))


def save(root, trees, *, step=5, num_hosts=2, metrics=None):
    """Uploads `trees` and a component `data` from some hosts, and commits them."""
    by_path = leaves(trees)
    chunks = {path: chunk_shape(leaf) for path, leaf in by_path.items()}
    listed = tuple(
        manifest.Leaf(
            path=path,
            shape=data(leaf).shape,
            dtype=str(data(leaf).dtype),
            chunk=chunks[path],
        )
        for path, leaf in by_path.items()
    )
    cursor = manifest.Leaf.of_file("data/cursor.json", len(CURSOR))
    saved = upload.UploadedStep(
        run=RUN,
        step_id=StepId(step, "0"),
        contents=manifest.Contents(leaves=(*listed, cursor), components=("data",)),
    )
    parts = [
        upload.Upload(
            root, saved, manifest.Host(id=f"m{number}.0", number=number, domains={})
        )
        for number in range(num_hosts)
    ]
    for part in parts:
        part.begin()
    turn = 0
    for number, leaf in enumerate(listed):
        for box in layout.cut(boxes.whole(leaf.shape), chunks[leaf.path]):
            place = tuple(map(slice, box.start, box.stop))
            values = np.array(data(by_path[leaf.path])[place], order="C")
            named = upload.Part(number, box, digest.values_digest(values))
            parts[turn % num_hosts].write([named], [values])
            turn += 1
    content = np.frombuffer(CURSOR, np.uint8)
    named = digest.values_digest(content)
    whole = boxes.whole(cursor.shape)
    parts[0].write([upload.Part(len(listed), whole, named)], [content])
    for part in parts:
        part.finish()
    upload.commit(
        root,
        saved,
        hosts=(),
        orbax_files=orbax_format.metadata_files(
            trees,
            ["data"],
            chunks=chunks,
            init_timestamp_nsecs=1,
            commit_timestamp_nsecs=2_000_000_000,
            metrics=metrics,
        ),
    )
    return saved
