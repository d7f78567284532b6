"""The shipped layouts of Megatron, against the same written with NumPy.

`ranks_of` and `global_of` cut and fuse a model as Megatron-core does. Samples of
`torch_dist` are those that Megatron-core wrote itself.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from elastic_ckpt.universal import opening, shipped_layouts
from tests.universal.formats import known_values as kv
from tests.universal.formats import stored_values
from tests.universal.layouts import hf_models as hf
from tests.universal.rules.relayout import assert_same, relayout, saved

SIZES = {"kv": hf.KV, "q": hf.Q}
# The arguments of a run, by whether its queries are grouped.
VALUES = {
    True: {"num_attention_heads": hf.HEADS, "num_query_groups": hf.KV},
    False: {"num_attention_heads": hf.KV, "num_query_groups": 1},
}
BLOCKS = {
    "dense": (hf.ATTENTION, hf.DENSE),
    "norms": (hf.ATTENTION, hf.QUERY_NORMS, hf.DENSE),
    "biases": (hf.ATTENTION, hf.BIASES, hf.DENSE),
    "experts": (hf.ATTENTION, hf.MIXTRAL),
}


def fused(arrays, tail):
    """Query, key and value of a layer, by group."""
    parts = [arrays[f"self_attn.{name}_proj.{tail}"] for name in "qkv"]
    groups = [part.reshape(hf.KV, -1, *part.shape[1:]) for part in parts]
    both = np.concatenate(groups, axis=1)
    return both.reshape(-1, *parts[0].shape[1:])


def layer_of(arrays, spelling):
    """The tensors of a layer by Megatron's names, and the dim that ranks share.

    Gate and up are a pair, of which each rank has a part.
    """
    qkv, fc1 = "self_attention.linear_qkv", "mlp.linear_fc1"
    norms = {
        "te": (f"{qkv}.layer_norm_weight", f"{fc1}.layer_norm_weight"),
        "plain": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
        # With experts.
        "te_experts": (f"{qkv}.layer_norm_weight", "pre_mlp_layernorm.weight"),
    }[spelling]
    made = {
        norms[0]: (arrays["input_layernorm.weight"], None),
        norms[1]: (arrays["post_attention_layernorm.weight"], None),
        f"{qkv}.weight": (fused(arrays, "weight"), 0),
        "self_attention.linear_proj.weight": (arrays["self_attn.o_proj.weight"], 1),
    }
    for name in "qk":
        if f"self_attn.{name}_norm.weight" in arrays:
            norm = arrays[f"self_attn.{name}_norm.weight"]
            made[f"self_attention.{name}_layernorm.weight"] = norm, None
    if "self_attn.q_proj.bias" in arrays:
        made[f"{qkv}.bias"] = fused(arrays, "bias"), 0
    if "mlp.gate_proj.weight" in arrays:
        pair = [arrays[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]
        made[f"{fc1}.weight"] = pair, 0
        made["mlp.linear_fc2.weight"] = arrays["mlp.down_proj.weight"], 1
    else:
        moe = "block_sparse_moe"
        made["mlp.router.weight"] = arrays[f"{moe}.gate.weight"], None
        for number in range(hf.EXPERTS):
            of_expert = f"{moe}.experts.{number}"
            pair = [arrays[f"{of_expert}.{name}.weight"] for name in ("w1", "w3")]
            made[f"expert {number} linear_fc1"] = pair, 0
            made[f"expert {number} linear_fc2"] = arrays[f"{of_expert}.w2.weight"], 1
    return made


def layers_of(arrays, spelling):
    for number in range(hf.LAYERS):
        prefix = f"model.layers.{number}."
        of_layer = {
            name.removeprefix(prefix): array
            for name, array in arrays.items()
            if name.startswith(prefix)
        }
        yield layer_of(of_layer, spelling)


def padded(array):
    return np.pad(array, ((0, 3), (0, 0)))


def ends_of(arrays):
    """The tensors outside of layers, and the dim that ranks share."""
    return {
        "embedding.word_embeddings.weight": (
            padded(arrays["model.embed_tokens.weight"]),
            0,
        ),
        "output_layer.weight": (padded(arrays["lm_head.weight"]), 0),
        "decoder.final_layernorm.weight": (arrays["model.norm.weight"], None),
    }


def part(value, dim, rank, ranks):
    if isinstance(value, list):
        return np.concatenate([part(each, dim, rank, ranks) for each in value])
    return value if dim is None else np.array_split(value, ranks, axis=dim)[rank]


def ranks_of(arrays, spelling, *, tp, pp, experts="local_experts.{}.{}.weight"):
    """The tensors of each rank; one expert-parallel rank has each expert alone."""
    is_moe = not any("mlp.gate_proj" in name for name in arrays)
    ep = hf.EXPERTS if is_moe else 1
    stages = np.array_split(list(layers_of(arrays, spelling)), pp)
    tensors = []
    for stage, rank, expert in np.ndindex(pp, tp, ep):
        held = {}
        for name, value in ends_of(arrays).items():
            if stage == (0 if name.startswith("embedding") else pp - 1):
                held[name] = value
        for local, layer in enumerate(stages[stage]):
            for name, value in layer.items():
                if name.startswith("expert "):
                    _, number, leaf = name.split()
                    if int(number) != expert:
                        continue
                    name = "mlp.experts." + experts.format(0, leaf)
                held[f"decoder.layers.{local}.{name}"] = value
        ranks = {"pp": (stage, pp), "tp": (rank, tp), "ep": (expert, ep)}
        ranks = {axis: number for axis, (number, count) in ranks.items() if count > 1}
        tensors += [
            saved(name, part(*value, rank, tp), **ranks) for name, value in held.items()
        ]
    counts = {"pp": pp, "tp": tp, "ep": ep}
    return tensors, {axis: count for axis, count in counts.items() if count > 1}


def global_of(arrays, spelling):
    """The tensors of torch_dist: layers and experts are stacked."""
    layers = list(layers_of(arrays, spelling))
    made = {name: part(*value, 0, 1) for name, value in ends_of(arrays).items()}
    for name in layers[0]:
        if not name.startswith("expert "):
            stacked = [part(*layer[name], 0, 1) for layer in layers]
            made[f"decoder.layers.{name}"] = np.stack(stacked)
    if "expert 0 linear_fc1" in layers[0]:
        for leaf in ("linear_fc1", "linear_fc2"):
            stacked = [
                [part(*layer[f"expert {n} {leaf}"], 0, 1) for n in range(hf.EXPERTS)]
                for layer in layers
            ]
            made[f"decoder.layers.mlp.experts.experts.{leaf}.weight"] = np.array(
                stacked
            )
    return made


def with_arguments(layout, *, grouped=True):
    values = {**VALUES[grouped], "group_query_attention": grouped}
    return layout.with_values({f"args/{name}": each for name, each in values.items()})


def with_states(tensors):
    """The same with what an optimizer has for them, which is not used."""
    kinds = ("master", "first_moment", "second_moment")
    others = [
        saved(each.name, each.values + 1, kind=kind, **dict(each.ranks))
        for each in tensors
        for kind in kinds
    ]
    return [*tensors, *others, saved("optimizer/step", np.float32(3), kind="step")]


@pytest.mark.parametrize("spelling", ["te", "plain"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_dense_ranks_become_the_model_of_hugging_face(spelling, tp, pp):
    # A dim of 11 cannot be cut in halves.
    blocks = {**hf.DENSE, **{n: tuple(map(even, s)) for n, s in hf.DENSE.items()}}
    arrays = hf.model(hf.ATTENTION, blocks)
    tensors, axes = ranks_of(arrays, spelling, tp=tp, pp=pp)
    layout = shipped_layouts.load("megatron_ranks_to_hf", sizes=SIZES)
    made = relayout(layout, with_states(tensors), axes, targets=arrays)
    assert_same(made, arrays)


def even(size):
    return 2 * size if size == hf.MLP else size


@pytest.mark.parametrize("experts", ["local_experts.{}.{}.weight", "{1}.weight{0}"])
def test_ranks_of_experts_become_the_model_of_hugging_face(experts):
    arrays = hf.model(*BLOCKS["experts"])
    tensors, axes = ranks_of(arrays, "plain", tp=1, pp=3, experts=experts)
    layout = shipped_layouts.load("megatron_ranks_to_hf", sizes=SIZES)
    assert_same(relayout(layout, tensors, axes, targets=arrays), arrays)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_global_tensors_become_the_model_of_hugging_face(blocks):
    arrays = hf.model(*BLOCKS[blocks])
    tensors = [saved(name, values) for name, values in global_of(arrays, "te").items()]
    sizes = {**SIZES, "vocab": hf.VOCAB}
    layout = shipped_layouts.load("megatron_to_hf", sizes=sizes)
    assert_same(relayout(layout, with_states(tensors)), arrays)
    layout = with_arguments(
        shipped_layouts.load("megatron_to_hf", sizes={"vocab": hf.VOCAB})
    )
    assert_same(relayout(layout, with_states(tensors)), arrays)


@pytest.mark.parametrize(
    ("blocks", "spelling"),
    [*((each, "te") for each in BLOCKS), ("experts", "te_experts")],
)
def test_a_model_of_hugging_face_becomes_global_tensors(blocks, spelling):
    arrays = hf.model(*BLOCKS[blocks])
    expected = global_of(arrays, spelling)
    layout = shipped_layouts.load("megatron_to_hf", sizes=SIZES)
    assert_same(relayout(layout, expected, targets=arrays), arrays)
    assert_same(relayout(layout.inverse(), arrays, targets=expected), expected)
    if blocks == "experts" and spelling == "te":
        # Without a target, the name of the norm is Transformer Engine's.
        expected = global_of(arrays, "te_experts")
    config = {"num_attention_heads": hf.HEADS, "num_key_value_heads": hf.KV}
    values = {f"config/{key}": value for key, value in config.items()}
    sizes = {"vocab": hf.VOCAB, "pad": 3}
    inverse = shipped_layouts.load("megatron_to_hf", sizes=sizes).inverse()
    assert_same(relayout(inverse.with_values(values), arrays), expected)


def test_without_grouped_queries_each_head_is_a_group():
    wide = hf.KV * hf.D
    alone = {hf.QUERY: (wide, hf.EMBED), "self_attn.o_proj.weight": (hf.EMBED, wide)}
    arrays = hf.model({**hf.ATTENTION, **alone}, hf.DENSE)
    tensors, axes = ranks_of(arrays, "te", tp=1, pp=3)
    layout = shipped_layouts.load("megatron_ranks_to_hf", sizes={"vocab": hf.VOCAB})
    made = relayout(with_arguments(layout, grouped=False), tensors, axes)
    assert_same(made, arrays)


@pytest.mark.slow
@pytest.mark.parametrize("sample", ["torch_dist_tp2_pp2", "torch_dist_ep2"])
def test_a_checkpoint_that_megatron_wrote_becomes_a_model_of_hugging_face(
    tmp_path, sample
):
    path = stored_values.unpacked(f"megatron/{sample}.tar.xz", tmp_path)
    checkpoint = opening.open_checkpoint(path)
    assert "megatron_to_hf" in shipped_layouts.fitting(checkpoint.tensors)
    tensors = [
        saved(each.name, stored_values.read(each), each.kind)
        for each in checkpoint.tensors
    ]
    sizes = {"kv": 2, "q": 2, "vocab": 16}
    made = relayout(shipped_layouts.load("megatron_to_hf", sizes=sizes), tensors)

    def known(name, *shape):
        return kv.known("fp32", name, shape).astype(jnp.bfloat16)

    layers = 4 if sample == "torch_dist_tp2_pp2" else 2
    qkv = known("decoder.layers.self_attention.linear_qkv.weight", layers, 32, 8)
    key = qkv.reshape(layers, 2, 4, 4, 8)[:, :, 2].reshape(layers, 8, 8)
    for number in range(layers):
        name = f"model.layers.{number}.self_attn.k_proj.weight"
        assert made[name].tobytes() == key[number].tobytes()
    if sample == "torch_dist_ep2":
        name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
        up = known(name, layers, 4, 24, 8)[1, 3, 12:]
        made_up = made["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
        assert made_up.tobytes() == up.tobytes()
