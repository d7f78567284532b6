"""The shipped layouts of Megatron, from samples that Megatron-core wrote.

The same is written with NumPy here: parameters, and both moments of Adam.
"""

import functools
import operator

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt import universal
from elastic_ckpt.universal import shipped_layouts
from tests.universal.formats import known_values as kv

VOCAB, EMBED, KV, Q, D, FF = 13, 8, 2, 2, 4, 12
SAMPLES = {
    "torch_dist_tp2_pp2": "megatron_llama_to_maxtext",
    "torch_dist_ep2": "megatron_mixtral_to_maxtext",
}
STATES = {
    "params/params": ("fp32", 1),
    "opt_state/0/mu/params": ("exp_avg", -1),
    "opt_state/0/nu/params": ("exp_avg_sq", -2),
}
# The step of Adam, and the number of the iteration.
COUNTS = ("opt_state/0/count", "opt_state/2/count", "step")
QUERY = "decoder/layers/self_attention/query/kernel"


def nested(leaves):
    tree = {}
    for name, leaf in leaves.items():
        *keys, last = name.split("/")
        inner = functools.reduce(lambda node, key: node.setdefault(key, {}), keys, tree)
        inner[last] = leaf
    return tree


def at(tree, name):
    return functools.reduce(operator.getitem, name.split("/"), tree)


def interleaved(heads):
    halves = heads.reshape(*heads.shape[:-1], 2, D // 2)
    return halves.swapaxes(-1, -2).reshape(heads.shape)


def maxtext(state, power, layers, *, interleave, with_experts):
    """MaxText's arrays of a state, by name."""

    def megatron(name, *shape):
        return kv.known(state, name, shape)

    def layer(name, *shape):
        return megatron(f"decoder.layers.{name}", layers, *shape)

    qkv = layer("self_attention.linear_qkv.weight", KV * (Q + 2) * D, EMBED)
    qkv = qkv.reshape(layers, KV, Q + 2, D, EMBED).transpose(4, 0, 1, 2, 3)
    query = qkv[:, :, :, :Q].reshape(EMBED, layers, KV * Q, D)
    key, value = qkv[:, :, :, Q], qkv[:, :, :, Q + 1]
    if interleave == 2:
        query, key = interleaved(query), interleaved(key)
    out = layer("self_attention.linear_proj.weight", EMBED, KV * Q * D)
    embedding = megatron("embedding.word_embeddings.weight", 16, EMBED)
    norms = "self_attention.linear_qkv", "mlp.linear_fc1"
    first, second = (layer(f"{each}.layer_norm_weight", EMBED).T for each in norms)
    arrays = {
        "token_embedder/embedding": embedding[:VOCAB],
        "decoder/decoder_norm/scale": megatron("decoder.final_layernorm.weight", EMBED),
        "decoder/logits_dense/kernel": megatron("output_layer.weight", 16, EMBED)[
            :VOCAB
        ].T,
        "decoder/layers/pre_self_attention_layer_norm/scale": first,
        "decoder/layers/post_self_attention_layer_norm/scale": second,
        QUERY: query * np.float32(D ** (-0.5 * power)),
        "decoder/layers/self_attention/key/kernel": key,
        "decoder/layers/self_attention/value/kernel": value,
        "decoder/layers/self_attention/out/kernel": out.reshape(
            layers, EMBED, KV * Q, D
        ).transpose(2, 0, 3, 1),
    }
    if with_experts:
        gate_up = layer("mlp.experts.experts.linear_fc1.weight", 4, 2 * FF, EMBED)
        gate, up = np.split(gate_up.transpose(1, 0, 3, 2), 2, axis=-1)
        down = layer("mlp.experts.experts.linear_fc2.weight", 4, EMBED, FF)
        router = layer("mlp.router.weight", 4, EMBED).transpose(2, 0, 1)
        moe = "decoder/layers/MoeBlock_0"
        arrays |= {f"{moe}/wi_0": gate, f"{moe}/wi_1": up, f"{moe}/gate/kernel": router}
        return arrays | {f"{moe}/wo": down.transpose(1, 0, 3, 2)}
    gate_up = layer("mlp.linear_fc1.weight", 2 * FF, EMBED).transpose(2, 0, 1)
    gate, up = np.split(gate_up, 2, axis=-1)
    down = layer("mlp.linear_fc2.weight", EMBED, FF).transpose(2, 0, 1)
    mlp = "decoder/layers/mlp"
    return arrays | {
        f"{mlp}/wi_0/kernel": gate,
        f"{mlp}/wi_1/kernel": up,
        f"{mlp}/wo/kernel": down,
    }


@pytest.mark.parametrize(
    ("sample", "interleave"),
    [("torch_dist_tp2_pp2", 1), ("torch_dist_tp2_pp2", 2), ("torch_dist_ep2", None)],
)
def test_parameters_and_moments_are_those_of_megatron(
    megatron_samples, sample, interleave
):
    layers, with_experts = (2, True) if "ep2" in sample else (4, False)
    expected = {
        f"{prefix}/{name}": array
        for prefix, (state, power) in STATES.items()
        for name, array in maxtext(
            *(state, power, layers), interleave=interleave, with_experts=with_experts
        ).items()
    }
    mesh = jax.make_mesh((4, 2), ("data", "model"))

    def leaf(array):
        # The longest dim that two devices divide is sharded.
        dims = [dim if size % 2 == 0 else -1 for dim, size in enumerate(array.shape)]
        longest = max(dims, key=lambda dim: array.shape[dim] if dim >= 0 else 0)
        spec = ["model" if dim == longest else None for dim in range(array.ndim)]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    leaves = {name: leaf(array) for name, array in expected.items()}
    replicated = NamedSharding(mesh, PartitionSpec())
    for count in COUNTS:
        leaves[count] = jax.ShapeDtypeStruct((), np.int32, sharding=replicated)
    sizes = {"interleave": interleave} if interleave else {}
    layout = shipped_layouts.load(SAMPLES[sample], sizes=sizes)
    state = universal.load(megatron_samples(sample), nested(leaves), layout=layout)
    assert [at(state, count) for count in COUNTS] == [2, 2, 2]
    for name, array in expected.items():
        loaded = np.asarray(at(state, name))
        assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape), name
        if name.endswith(QUERY):
            np.testing.assert_array_max_ulp(loaded, array, maxulp=1)
        else:
            assert loaded.tobytes() == array.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_layout_of_a_sample_is_recommended(megatron_samples, sample):
    tensors = universal.open_checkpoint(megatron_samples(sample)).tensors
    assert SAMPLES[sample] in shipped_layouts.fitting(tensors)
