"""The values of the small models that the writers of foreign checkpoints save.

Every value follows from its name, so that a test needs no copy of them: the writers
put them into the models and optimizers of the frameworks, in place of trained ones.
"""

import zlib

import numpy as np

# By parameter of a model: its shape, without padding and tensor parallelism.
VOCAB, EMBED, HEADS_KV, QUERIES, HEAD, FF = 13, 8, 4, 2, 2, 8
BLOCKS = 4
BLOCK = {
    "norm1.weight": (EMBED,),
    "qkv.weight": (HEADS_KV * (QUERIES + 2) * HEAD, EMBED),
    "dense.weight": (EMBED, HEADS_KV * QUERIES * HEAD),
    "dense.bias": (EMBED,),
    "norm2.weight": (EMBED,),
    "gate_up.weight": (2 * FF, EMBED),
    "down.weight": (EMBED, FF),
}
# Three elements are not a multiple of any number of ranks.
FINAL = {"norm.weight": (EMBED,), "odd.bias": (3,)}
EXPERT = {"up.weight": (FF, EMBED), "down.weight": (EMBED, FF)}
STATES = ("fp32", "exp_avg", "exp_avg_sq")
# The state of a tensor by its kind, see `StoredTensor`.
OF_KIND = {
    "parameter": "fp32",
    "master": "fp32",
    "first_moment": "exp_avg",
    "second_moment": "exp_avg_sq",
    "momentum_buffer": "momentum_buffer",
}


def known(state, name, shape):
    """float32 values of a state of a parameter."""
    rng = np.random.default_rng(zlib.crc32(f"{state} {name}".encode()))
    values = rng.standard_normal(shape, dtype=np.float32)
    return np.abs(values) if state == "exp_avg_sq" else values


def padded(array, multiple):
    """With rows of zeros, so that the first dim is a multiple."""
    rows = -len(array) % multiple
    return np.concatenate([array, np.zeros((rows, *array.shape[1:]), array.dtype)])


def shard(name, array, rank, ranks):
    """The part of a parameter of one of the tensor-parallel ranks."""
    if name.endswith(("dense.weight", "down.weight")):
        return np.split(array, ranks, axis=1)[rank]
    if name.endswith("gate_up.weight"):
        gate, up = np.split(array, 2)
        halves = np.split(gate, ranks)[rank], np.split(up, ranks)[rank]
        return np.concatenate(halves)
    if name.endswith(("qkv.weight", "words.weight", "up.weight")):
        return np.split(array, ranks)[rank]
    return array


def full_shape(name, shape):
    """The shape of a parameter over all ranks; `shape` if it is none of a block."""
    for suffix, full in {**BLOCK, **EXPERT, **FINAL}.items():
        if name.endswith(f".{suffix}"):
            return full
    return (VOCAB, EMBED) if name.endswith("words.weight") else shape


def of_rank(state, name, shape, rank, ranks):
    """The part of a parameter of full `shape` that one tensor-parallel rank holds."""
    if ranks > 1 and name.endswith("norm2.weight"):
        # Ranks have different values, whose mean counts.
        return known(state, f"{name} of rank {rank}", shape)
    array = known(state, name, shape)
    if name.endswith("words.weight"):
        array = padded(array, 8 * ranks)
    return np.ascontiguousarray(shard(name, array, rank, ranks))
