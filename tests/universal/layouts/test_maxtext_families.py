"""Layouts to MaxText of families with blocks of layers, against NumPy."""

import functools
import re

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import shipped_layouts
from elastic_ckpt.universal.rules.layout import Layout
from tests.maxtext import small_models
from tests.universal.rules.relayout import assert_same, relayout, saved, stored

# By model: the number of layers in a block, where MaxText scans blocks.
BLOCKS = {
    **{"gemma2": 1, "gemma3": 6, "olmo3": 4, "gpt_oss": 2},
    **{"deepseek2": 1, "deepseek3": 1, "llama4_scout": 4, "llama4_maverick": 4},
    "qwen3_next": 4,
}
# Leaves of the query that the layouts scale, and others that they shift.
ROUNDED = re.compile("norm|q_proj|embed")


def transposed(array, _):
    return array.T


def same(array, _):
    return array


def above_one(array, _):
    return array + np.float32(1)


def divided(array, config):
    # By the root of what Hugging Face divides the products by.
    scale = config["query_pre_attn_scalar"] ** -0.5
    made = (array.astype(np.float64) * scale).astype(np.float32)
    return heads(made, config)


def heads(array, config, *, dim="head_dim"):
    """Rows that are heads: [heads * d, embed] to [embed, heads, d]."""
    return array.T.reshape(array.shape[1], -1, config[dim])


def of_heads(array, config, *, dim="head_dim"):
    """Columns that are heads: [embed, heads * d] to [heads, d, embed]."""
    return array.T.reshape(-1, config[dim], array.shape[0])


def bias(array, config):
    return array.reshape(-1, config["head_dim"])


def attention(at, leaves, query=heads):
    return {
        "self_attn.q_proj.weight": (f"{at}/query/kernel", query),
        "self_attn.k_proj.weight": (f"{at}/key/kernel", heads),
        "self_attn.v_proj.weight": (f"{at}/value/kernel", heads),
        "self_attn.o_proj.weight": (f"{at}/out/kernel", of_heads),
        **{
            f"self_attn.{hf}": (f"{at}/{leaf}", function)
            for hf, (leaf, function) in leaves.items()
        },
    }


def norms(function, **leaves):
    return {f"{hf}.weight": (f"{leaf}/scale", function) for hf, leaf in leaves.items()}


def mlp(at, hf="mlp"):
    names = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
    return {
        f"{hf}.{each}_proj.weight": (f"{at}/{leaf}/kernel", transposed)
        for each, leaf in names.items()
    }


def experts(at, router="mlp.gate.weight"):
    # Those of all experts are stacked before, under `{}`.
    names = {"gate": "wi_0", "up": "wi_1", "down": "wo"}
    made = {
        f"mlp.experts.{{}}.{each}_proj.weight": (f"{at}/{leaf}", experts_transposed)
        for each, leaf in names.items()
    }
    return {**made, router: (f"{at}/gate/kernel", transposed)}


def experts_transposed(array, _):
    return array.transpose(0, 2, 1)


USUAL = norms(
    same,
    input_layernorm="pre_self_attention_layer_norm",
    post_attention_layernorm="post_self_attention_layer_norm",
)
GEMMA = norms(
    above_one,
    input_layernorm="pre_self_attention_norm",
    post_attention_layernorm="post_self_attention_norm",
    pre_feedforward_layernorm="pre_ffw_norm",
    post_feedforward_layernorm="post_ffw_norm",
)
LATENT = {
    f"self_attn.{hf}": (f"self_attention/{leaf}", function)
    for hf, (leaf, function) in {
        "q_proj.weight": (
            "query/kernel",
            lambda array, _: array.T.reshape(
                array.shape[1], -1, small_models.NOPE + small_models.ROPE
            ),
        ),
        "q_a_proj.weight": ("wq_a/kernel", transposed),
        "q_a_layernorm.weight": ("q_norm/scale", same),
        "q_b_proj.weight": (
            "wq_b/kernel",
            lambda array, _: array.T.reshape(
                array.shape[1], -1, small_models.NOPE + small_models.ROPE
            ),
        ),
        "kv_a_proj_with_mqa.weight": ("wkv_a/kernel", transposed),
        "kv_a_layernorm.weight": ("kv_norm/scale", same),
        "kv_b_proj.weight": (
            "wkv_b/kernel",
            lambda array, _: array.T.reshape(
                array.shape[1], -1, small_models.NOPE + small_models.VALUE
            ),
        ),
        "o_proj.weight": (
            "out/kernel",
            functools.partial(of_heads, dim="v_head_dim"),
        ),
    }.items()
}
LLAMA4_MOE, DEEPSEEK_MOE = "Llama4MoEBlock_0", "DeepSeekMoeBlock_0"
# By model type and a tensor of a layer: the leaf and how it is made.
LEAVES = {
    "gemma2": {**GEMMA, **attention("self_attention", {}, divided), **mlp("mlp")},
    "gemma3_text": {
        **GEMMA,
        **attention(
            "self_attention",
            {
                "q_norm.weight": ("query_norm/scale", above_one),
                "k_norm.weight": ("key_norm/scale", above_one),
            },
        ),
        **mlp("mlp"),
    },
    "olmo3": {
        **norms(
            same,
            post_attention_layernorm="post_self_attention_layer_norm",
            post_feedforward_layernorm="post_mlp_layer_norm",
        ),
        **attention(
            "attention",
            {
                "q_norm.weight": ("query_norm/scale", same),
                "k_norm.weight": ("key_norm/scale", same),
            },
        ),
        **mlp("mlp"),
    },
    "gpt_oss": {
        **USUAL,
        **attention(
            "GptOssAttention",
            {
                "q_proj.bias": ("query/bias", bias),
                "k_proj.bias": ("key/bias", bias),
                "v_proj.bias": ("value/bias", bias),
                "o_proj.bias": ("out/bias", same),
                "sinks": ("sinks", same),
            },
        ),
        "mlp.router.weight": ("GptOssMlp/gate/kernel", transposed),
        "mlp.router.bias": ("GptOssMlp/gate/bias", same),
        "mlp.experts.gate_proj": ("GptOssMlp/wi_0", same),
        "mlp.experts.up_proj": ("GptOssMlp/wi_1", same),
        "mlp.experts.gate_proj_bias": ("GptOssMlp/wi_0_bias", same),
        "mlp.experts.up_proj_bias": ("GptOssMlp/wi_1_bias", same),
        "mlp.experts.down_proj": ("GptOssMlp/wo", same),
        "mlp.experts.down_proj_bias": ("GptOssMlp/wo_bias", same),
    },
    "llama4_text": {
        **USUAL,
        **attention("self_attention", {}),
        **mlp("mlp", "feed_forward"),
        **mlp(f"{LLAMA4_MOE}/shared_experts", "feed_forward.shared_expert"),
        "feed_forward.router.weight": (
            f"{LLAMA4_MOE}/MoeBlock_0/gate/kernel",
            transposed,
        ),
        "feed_forward.experts.gate_proj": (f"{LLAMA4_MOE}/MoeBlock_0/wi_0", same),
        "feed_forward.experts.up_proj": (f"{LLAMA4_MOE}/MoeBlock_0/wi_1", same),
        "feed_forward.experts.down_proj": (f"{LLAMA4_MOE}/MoeBlock_0/wo", same),
    },
    "deepseek_v3": {
        **USUAL,
        **LATENT,
        **mlp("mlp"),
        **experts(f"{DEEPSEEK_MOE}/MoeBlock_0"),
        **mlp(f"{DEEPSEEK_MOE}/shared_experts", "mlp.shared_experts"),
        "mlp.gate.e_score_correction_bias": (
            f"{DEEPSEEK_MOE}/MoeBlock_0/gate/bias",
            same,
        ),
    },
    "qwen3_next": {
        **norms(
            same,
            input_layernorm="input_layernorm",
            post_attention_layernorm="post_attention_layernorm",
        ),
        **attention(
            "attention/attention",
            {
                "q_norm.weight": ("query_norm/scale", same),
                "k_norm.weight": ("key_norm/scale", same),
                "o_proj.weight": ("out/kernel", transposed),
                "q_proj.weight": (
                    "query/kernel",
                    lambda array, config: array.T.reshape(
                        array.shape[1], -1, 2 * config["head_dim"]
                    ),
                ),
            },
        ),
        **{
            f"linear_attn.{each}.weight": (f"attention/{each}/kernel", transposed)
            for each in ("in_proj_qkvz", "in_proj_ba", "out_proj", "conv1d")
        },
        "linear_attn.A_log": ("attention/A_log", same),
        "linear_attn.dt_bias": ("attention/dt_bias", same),
        "linear_attn.norm.weight": ("attention/norm/rms_norm/scale", same),
        **experts("mlp/routed_experts"),
        **mlp("mlp/shared_expert", "mlp.shared_expert"),
        "mlp.shared_expert_gate.weight": ("mlp/shared_expert_gate/kernel", transposed),
    },
}
LEAVES["deepseek_v2"] = LEAVES["deepseek_v3"]


def by_layer(arrays, kind):
    """The tensors of each layer: experts stacked, gate and up apart."""
    layers = {}
    for name, array in arrays.items():
        matched = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
        if not matched:
            continue
        layer, leaf = layers.setdefault(int(matched[1]), {}), matched[2]
        if "gate_up_proj" in leaf:
            gate, up = np.split(array, 2, axis=-1)
            if kind == "gpt_oss":
                gate, up = array[..., ::2], array[..., 1::2]
            layer[leaf.replace("gate_up", "gate")] = gate
            layer[leaf.replace("gate_up", "up")] = up
        elif numbered := re.fullmatch(r"(mlp\.experts)\.\d+\.(.*)", leaf):
            layer.setdefault(f"{numbered[1]}.{{}}.{numbered[2]}", []).append(array)
        else:
            layer[leaf] = array
    return [layers[number] for number in range(len(layers))]


def ends(arrays, config):
    tree = {
        "token_embedder/embedding": arrays["model.embed_tokens.weight"],
        "decoder/decoder_norm/scale": arrays["model.norm.weight"],
    }
    if "lm_head.weight" in arrays:
        tree["decoder/logits_dense/kernel"] = arrays["lm_head.weight"].T
    if config["model_type"].startswith("gemma"):
        tree["decoder/decoder_norm/scale"] = tree["decoder/decoder_norm/scale"] + 1
        embedding = tree["token_embedder/embedding"] * config["hidden_size"] ** 0.5
        tree["token_embedder/embedding"] = embedding.astype(np.float32)
    if config["model_type"] == "gemma2":
        padded = np.zeros((small_models.PADDED, config["hidden_size"]), np.float32)
        padded[: small_models.VOCAB] = tree["token_embedder/embedding"]
        tree["token_embedder/embedding"] = padded
    if config["model_type"] == "gemma3_text":
        text = tree["token_embedder/embedding"][: small_models.VOCAB]
        tree["token_embedder/embedding"] = text
    return tree


def unscanned(name, arrays):
    """MaxText's tree without scanned layers, by path."""
    config = small_models.hf_config(name)
    kind = config["model_type"]
    tree = ends(arrays, config)
    for number, layer in enumerate(by_layer(arrays, kind)):
        at = f"layers_{number}"
        dense = config.get("first_k_dense_replace")
        if dense is not None:
            at = f"dense_{at}" if number < dense else f"moe_layers_{number - dense}"
        for hf, array in layer.items():
            leaf, function = LEAVES[kind][hf]
            if kind == "gemma2":
                at = f"layers_{number // 2}"
                first, _, rest = leaf.partition("/")
                leaf = f"{first}_{('local', 'global')[number % 2]}/{rest}"
            tree[f"decoder/{at}/{leaf}"] = function(np.array(array), config)
    return tree


def scanned(name, arrays):
    """MaxText's tree with scanned layers, by path."""
    tree, stacks = {}, {}
    block = BLOCKS[name]
    for path, array in unscanned(name, arrays).items():
        matched = re.fullmatch(r"decoder/(\w*?layers)_(\d+)/(.*)", path)
        if not matched:
            tree[path] = array
            continue
        stack, number, leaf = matched[1], int(matched[2]), matched[3]
        total = small_models.hf_config(name)["num_hidden_layers"]
        place = number % block
        if number >= total - total % block:
            at = f"decoder/layers_remainder/layers_{place}/{leaf}"
        elif block > 1:
            at = f"decoder/layers/layers_{place}/{leaf}"
        else:
            at = f"decoder/{stack}/{leaf}"
        stacks.setdefault(at, []).append(array)
    for path, layers in stacks.items():
        is_rest = "layers_remainder" in path
        # MaxText stacks this bias otherwise.
        at = 0 if path.endswith("DeepSeekMoeBlock_0/MoeBlock_0/gate/bias") else 1
        tree[path] = layers[0] if is_rest else np.stack(layers, axis=at)
    return tree if name != "qwen3_next" else hybrid(tree)


def hybrid(tree):
    """The tree with the layers of linear attention in one leaf."""
    made, local = {}, {}
    for path, array in tree.items():
        matched = re.fullmatch(r"(decoder/layers\w*)/layers_(\d)/(.*)", path)
        if not matched:
            made[path] = array
        elif matched[2] == "3":
            made[f"{matched[1]}/global_layer/{matched[3]}"] = array
        else:
            at = f"{matched[1]}/local_layers/{matched[3]}"
            local.setdefault(at, []).append(array)
    for path, arrays in local.items():
        made[path] = np.stack(arrays, axis=1 + ("remainder" not in path))
    return made


def with_config(name, form):
    """The layout of a model with the numbers of its `config.json`."""
    _, _, (layout, sizes) = small_models.MODELS[name]
    config = small_models.hf_config(name)
    numbers = {
        f"config/{key}": value for key, value in config.items() if type(value) is int
    }
    return shipped_layouts.load(layout + form, sizes=sizes).with_values(numbers)


@pytest.mark.parametrize("form", ["", "_unscanned"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_model_of_hugging_face_becomes_that_of_maxtext_and_back(name, form):
    arrays = small_models.tensors(name)
    make = unscanned if form else scanned
    expected = {
        f"params/params/{path}": np.ascontiguousarray(array)
        for path, array in make(name, arrays).items()
    }
    layout = with_config(name, form)
    assert_same(relayout(layout, arrays), expected)
    assert_same(relayout(layout, arrays, targets=expected), expected)
    rest = {"step": np.int32(7), "opt_state/0/mu/params/w": np.ones(3)}
    made = relayout(layout.inverse(), {**expected, **rest})
    if name == "gemma3":
        # Rows that MaxText lacks.
        arrays["model.embed_tokens.weight"][small_models.VOCAB :] = 0
    if name.startswith("gemma"):
        for path, array in arrays.items():
            if ROUNDED.search(path):
                np.testing.assert_allclose(made[path], array, rtol=0, atol=3e-7)
                made[path] = array
    assert_same(made, arrays)


@pytest.mark.parametrize("name", ["gemma3", "llama4_scout"])
def test_a_language_model_beside_a_vision_model_goes_through_two_layouts(name):
    _, _, (last, sizes) = small_models.MODELS[name]
    through = {"tree": "items", "through": ["hf_language_model", last]}
    config = {
        f"config/text_config/{key}": value
        for key, value in small_models.hf_config(name).items()
        if type(value) is int
    }
    layout = Layout.from_dict(through).with_sizes(sizes).with_values(config)
    arrays = small_models.tensors(name)
    beside = {f"language_model.{key}": value for key, value in arrays.items()}
    beside["vision_tower.norm.weight"] = np.ones(3)
    made = relayout(layout, beside)
    assert_same(made, relayout(with_config(name, ""), arrays))
    back = relayout(layout.inverse(), made)
    assert back.keys() == beside.keys() - {"vision_tower.norm.weight"}


@pytest.mark.parametrize("form", ["", "_unscanned"])
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_the_bias_of_experts_comes_back_from_where_training_saves_it(
    form, has_optimizer
):
    arrays = small_models.tensors("deepseek3")
    made = (unscanned if form else scanned)("deepseek3", arrays)
    tree = {
        f"nnx_aux/model/{path}"
        if path.endswith("gate/bias")
        else f"params/params/{path}": value
        for path, value in made.items()
    }
    rest = {
        "step": np.int32(1),
        "opt_state/0/mu/params/decoder/decoder_norm/scale": np.ones(3),
        "nnx_aux/model/decoder/moe_layers/rngs/params/key": np.ones((3, 4), np.uint32),
        "nnx_aux/model/decoder/rngs/params/count": np.uint32(1),
    }
    layout = with_config("deepseek3", form).inverse()
    if not has_optimizer:
        layout = layout.weights()
    assert_same(relayout(layout, {**tree, **rest}), arrays)


@pytest.mark.parametrize("form", ["", "_unscanned"])
def test_experts_of_gpt_oss_are_read_in_four_bits(form):
    rng = np.random.default_rng(0)
    arrays, packed = small_models.tensors("gpt_oss"), {}
    for name, array in arrays.items():
        if not re.search(r"experts\.\w+_proj$", name):
            packed[name] = array
            continue
        experts, inputs, outputs = array.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 4, 2), np.uint8)
        scales = rng.integers(120, 130, blocks.shape[:3], np.uint8)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        halves = np.stack([blocks & 15, blocks >> 4], axis=-1)
        numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        numbers = numbers.reshape(*scales.shape, 4) * 2.0 ** (scales[..., None] - 127.0)
        whole = numbers.reshape(experts, outputs, inputs).swapaxes(1, 2)
        arrays[name] = whole.astype(ml_dtypes.bfloat16)
    layout = with_config("gpt_oss", form)
    assert_same(relayout(layout, packed), relayout(layout, arrays))


@pytest.mark.parametrize("form", ["", "_unscanned"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.slow
def test_a_model_of_maxtext_fits_no_layout_of_another_family(name, form):
    _, _, (layout, _) = small_models.MODELS[name]
    arrays = small_models.tensors(name)
    make = unscanned if form else scanned
    tree = {f"params/params/{key}": value for key, value in make(name, arrays).items()}
    assert layout + form in fitting(arrays)
    fits = [each for each in fitting(tree) if each.startswith("hf_")]
    assert fits == [f"{layout}{form} (inverse)"]


def fitting(arrays):
    tensors = [saved(name, values) for name, values in arrays.items()]
    return shipped_layouts.fitting(stored(tensors))
