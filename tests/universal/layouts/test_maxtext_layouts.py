"""The shipped layouts of MaxText, against the same written with NumPy."""

import numpy as np
import pytest

from elastic_ckpt.universal import shipped_layouts
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal.layouts import hf_models as hf
from tests.universal.rules.relayout import assert_same, relayout

MODELS = {
    "llama": ("hf_llama_to_maxtext", (hf.ATTENTION, hf.DENSE)),
    "llama3.1": ("hf_llama_to_maxtext", (hf.ATTENTION, hf.DENSE)),
    "mixtral": ("hf_mixtral_to_maxtext", (hf.ATTENTION, hf.MIXTRAL)),
    "qwen2": ("hf_qwen3_to_maxtext", (hf.ATTENTION, hf.BIASES, hf.DENSE)),
    "qwen3": ("hf_qwen3_to_maxtext", (hf.ATTENTION, hf.QUERY_NORMS, hf.DENSE)),
    "qwen3_moe": (
        "hf_qwen3_to_maxtext",
        (hf.ATTENTION, hf.QUERY_NORMS, hf.QWEN_EXPERTS),
    ),
}
LLAMA = [
    *("hf_llama_to_maxtext", "hf_llama_to_maxtext_unscanned"),
    "megatron_llama_to_maxtext",
]
SCALED = ("llama", "llama3.1", "mixtral")
# What has to be chosen.
CHOSEN = {"llama": {"interleave": 1}, "llama3.1": {"interleave": 2}}


def maxtext(model, arrays):
    """The tensors of MaxText that a model becomes, by path."""
    tree = {
        "token_embedder/embedding": arrays["model.embed_tokens.weight"],
        "decoder/decoder_norm/scale": arrays["model.norm.weight"],
    }
    if "lm_head.weight" in arrays:
        tree["decoder/logits_dense/kernel"] = arrays["lm_head.weight"].T
    for name, stacked in layers(model, arrays).items():
        tree[f"decoder/layers/{name}"] = stacked
    return {f"params/params/{name}": np.ascontiguousarray(tree[name]) for name in tree}


def layers(model, arrays):
    def stacked(name):
        return np.stack([each.T for each in hf.layers(arrays, name)], axis=1)

    def heads(name):
        kernel = stacked(f"self_attn.{name}_proj.weight")
        return kernel.reshape(hf.EMBED, hf.LAYERS, -1, hf.D)

    query, key = heads("q"), heads("k")
    if model in SCALED:
        query = (query.astype(np.float64) * hf.D**-0.5).astype(np.float32)
    if model == "llama3.1":
        query, key = interleaved(query), interleaved(key)
    out = np.stack(hf.layers(arrays, "self_attn.o_proj.weight"))
    out = out.reshape(hf.LAYERS, hf.EMBED, hf.HEADS, hf.D)
    tree = {
        "pre_self_attention_layer_norm/scale": stacked("input_layernorm.weight"),
        "post_self_attention_layer_norm/scale": stacked(
            "post_attention_layernorm.weight"
        ),
        "self_attention/query/kernel": query,
        "self_attention/key/kernel": key,
        "self_attention/value/kernel": heads("v"),
        "self_attention/out/kernel": out.transpose(2, 0, 3, 1),
    }
    for name, short in {"query": "q", "key": "k", "value": "v"}.items():
        if f"model.layers.0.self_attn.{short}_norm.weight" in arrays:
            scale = stacked(f"self_attn.{short}_norm.weight")
            tree[f"self_attention/{name}_norm/scale"] = scale
        if f"model.layers.0.self_attn.{short}_proj.bias" in arrays:
            bias = np.stack(hf.layers(arrays, f"self_attn.{short}_proj.bias"))
            bias = bias.reshape(hf.LAYERS, -1, hf.D).transpose(1, 0, 2)
            tree[f"self_attention/{name}/bias"] = bias
    names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    prefix, block = "mlp.experts.{}.", "moe_block"
    if model == "mixtral":
        names = {"wi_0": "w1", "wi_1": "w3", "wo": "w2"}
        prefix, block = "block_sparse_moe.experts.{}.", "MoeBlock_0"
    if "model.layers.0.mlp.gate_proj.weight" in arrays:
        for name, leaf in names.items():
            tree[f"mlp/{name}/kernel"] = stacked(f"mlp.{leaf}.weight")
        return tree
    for name, leaf in names.items():
        of_all = np.array(hf.experts(arrays, f"{prefix}{leaf}.weight"))
        tree[f"{block}/{name}"] = of_all.transpose(1, 0, 3, 2)
    tree[f"{block}/gate/kernel"] = stacked(f"{prefix.partition('.')[0]}.gate.weight")
    return tree


def load(model, **sizes):
    """The layout of a model, with what has to be chosen."""
    name, _ = MODELS[model]
    return shipped_layouts.load(name, sizes={**CHOSEN.get(model, {}), **sizes})


def interleaved(kernel):
    """The halves of each head, element by element."""
    first, second = np.split(kernel, 2, axis=-1)
    return np.stack([first, second], axis=-1).reshape(kernel.shape)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_hugging_face_becomes_that_of_maxtext(model):
    _, blocks = MODELS[model]
    arrays = hf.model(*blocks)
    expected = maxtext(model, arrays)
    assert_same(relayout(load(model), arrays, targets=expected), expected)
    with_sizes = load(model, kv=hf.KV, d=hf.D)
    assert_same(relayout(with_sizes, arrays), expected)
    config = {"num_attention_heads": hf.HEADS, "num_key_value_heads": hf.KV}
    values = {f"config/{key}": value for key, value in config.items()}
    with_config = load(model).with_values(values)
    assert_same(relayout(with_config, arrays), expected)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_maxtext_becomes_that_of_hugging_face(model):
    _, blocks = MODELS[model]
    expected = hf.model(*blocks)
    tree = maxtext(model, expected)
    rest = {"step": np.int32(7), "opt_state/0/mu/params/w": np.ones(3)}
    made = relayout(load(model).inverse(), {**tree, **rest})
    if model in SCALED:
        for layer in range(hf.LAYERS):
            query = f"model.layers.{layer}.{hf.QUERY}"
            np.testing.assert_array_max_ulp(made[query], expected[query], maxulp=1)
            made[query] = expected[query]
    assert_same(made, expected)


def test_a_model_whose_output_is_its_embedding_has_one_tensor_less():
    _, blocks = MODELS["qwen3"]
    arrays = hf.model(*blocks, head=False)
    expected = maxtext("qwen3", arrays)
    assert_same(relayout(load("qwen3"), arrays, targets=expected), expected)


@pytest.mark.parametrize("name", LLAMA)
@pytest.mark.parametrize("is_inverse", [False, True])
def test_what_only_a_user_knows_of_llama_has_to_be_chosen(name, is_inverse):
    arrays = hf.model(hf.ATTENTION, hf.DENSE)
    targets = maxtext("llama", arrays)
    # Sizes from which the other would follow do not choose it.
    layout = shipped_layouts.load(name, sizes={"kv": hf.KV, "d": hf.D, "part": hf.D})
    if is_inverse:
        layout, arrays, targets = layout.inverse(), targets, arrays
    with pytest.raises(
        LayoutError, match=r"'interleave'.* 1 for .*; 2 for .*llama3\.1"
    ):
        relayout(layout, arrays, targets=targets)
    with pytest.raises(LayoutError, match="interleave cannot be 3: 1 for"):
        shipped_layouts.load(name, sizes={"interleave": 3})
