"""Every shipped layout makes of a fixed model what it always made, and back.

`tests/golden/layouts.json` has a digest of the tensors that each case makes. With
`--update-golden` this file writes it anew; the families (`tests/universal/families`)
and MaxText (`tests/maxtext`) show that the trees are those of the models: by logits.
"""

import functools
import itertools
import json
import os
import re
import zlib
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import opening, shipped
from elastic_ckpt.universal.rules.layout import Layout
from tests.conftest import GOLDEN
from tests.maxtext import small_models
from tests.universal.formats import stored_values
from tests.universal.rules.relayout import assert_same, digest, relayout, saved

DIGESTS = GOLDEN / "layouts.json"
# Some are like others for their layouts.
ALIKE = ("llama2", "llama3.3", "qwen3")
MODELS = [name for name in small_models.MODELS if name not in ALIKE]
# What is scaled on the way there returns within a rounding.
SCALED = {
    **dict.fromkeys(("hf_llama", "hf_mixtral"), re.compile("q_proj")),
    **dict.fromkeys(("hf_gemma2", "hf_gemma3"), re.compile("norm|q_proj|embed")),
}
# Families whose layout to a plain tree is that of another.
SAME_AS = {"hf_llama": "hf_llama3", "hf_gemma2": "hf_gemma3"}
# Layouts that tests of their own have.
ELSEWHERE = {"lora", "hf_fp8"}


class Case(NamedTuple):
    """A layout with all sizes, what it reads, and what comes back, if anything does."""

    layout: Layout
    # Arrays by name, or `Saved` tensors.
    tensors: Any
    axes: Any = None
    back: Any = None
    # Names that come back within a rounding.
    rounded: re.Pattern | None = None


def family(name):
    """The layout of a model, but for the tree to which it leads."""
    return small_models.MODELS[name].layout.removesuffix("_to_maxtext")


def plain_layout(name):
    return SAME_AS.get(family(name), family(name))


def numbers(name):
    """The numbers of a model's `config.json`, as values of a checkpoint."""
    config = small_models.hf_config(name).items()
    return {f"config/{key}": value for key, value in config if type(value) is int}


def of_model(names, name, **sizes):
    """A layout, or one through several, for a model."""
    is_one = isinstance(names, str)
    layout = shipped.load(names) if is_one else Layout.from_dict({"through": names})
    return layout.with_sizes(sizes).with_values(numbers(name))


@functools.cache
def hf(name):
    return small_models.tensors(name)


def to_maxtext(name):
    model = small_models.MODELS[name]
    back = dict(hf(name))
    if name == "gemma3":
        # MaxText lacks the rows of the padding.
        embedding = back["model.embed_tokens.weight"].copy()
        embedding[small_models.VOCAB :] = 0
        back["model.embed_tokens.weight"] = embedding
    layout = of_model(model.layout, name, **model.sizes)
    return Case(layout, hf(name), back=back, rounded=SCALED.get(family(name)))


def phi():
    """LLaMA, with fused matrices."""
    arrays = dict(hf("llama3"))
    for name in hf("llama3"):
        for first, *others in (("q", "k", "v"), ("gate", "up")):
            if f".{first}_proj" in name:
                names = [name.replace(f"{first}_", f"{p}_") for p in (first, *others)]
                fused = name.replace(first, "qkv" if "k" in others else "gate_up")
                arrays[fused] = np.concatenate([arrays.pop(each) for each in names])
    return Case(of_model("hf_phi4", "llama3"), arrays, back=arrays)


def plain(name, *others, without=None, **sizes):
    layouts = (plain_layout(name), *others)
    layout = of_model(layouts if others else layouts[0], name, **sizes)
    arrays = {key: each for key, each in hf(name).items() if key != without}
    return Case(layout, arrays, back=arrays)


def beside_vision(name):
    arrays = {f"language_model.{key}": value for key, value in hf(name).items()}
    layout = of_model(("hf_language_model", plain_layout(name)), name)
    tensors = {**arrays, "vision_tower.norm.weight": np.ones(3)}
    return Case(layout, tensors, back=arrays)


def four_bits():
    """Experts of GPT-OSS as blocks of numbers of four bits, with scales."""
    rng, tensors = np.random.default_rng(0), {}
    for name, array in hf("gpt_oss").items():
        if not re.search(r"experts\.\w+_proj$", name):
            tensors[name] = array
            continue
        experts, inputs, outputs = array.shape
        shape = (experts, outputs, inputs // 4, 2)
        tensors[f"{name}_blocks"] = rng.integers(0, 256, shape, np.uint8)
        tensors[f"{name}_scales"] = rng.integers(120, 130, shape[:3], np.uint8)
    return Case(of_model("hf_gpt_oss", "gpt_oss"), tensors)


def from_scanned(form, **sizes):
    """From scanned layers of a state to others; six layers, three in each part."""
    arrays = dict(hf("qwen3_moe"))
    for tensor, values in hf("qwen3_moe").items():
        later = re.sub(r"layers\.(\d)", lambda n: f"layers.{int(n[1]) + 3}", tensor)
        if later != tensor:
            arrays[later] = values + np.float32(1)
    tree = relayout(of_model("hf_qwen3_to_maxtext", "qwen3_moe"), arrays)
    state = {"step": np.int32(7), "opt_state/0/count": np.int32(5)}
    for number, place in enumerate(("params", "opt_state/0/mu", "opt_state/0/nu")):
        for path, values in tree.items():
            state[path.replace("params", place, 1)] = values + np.float32(number)
    decoder = "nnx_aux/model/decoder"
    inner = f"{decoder}/layers/self_attention/rngs/dropout/count"
    of_layers = {inner: np.ones(6, np.uint32)}
    outer = {f"{decoder}/rngs/dropout/count": np.uint32(1)}
    layout = shipped.load(f"maxtext_{form}_to_scanned").inverse().with_sizes(sizes)
    tree = {**state, **outer, **of_layers}
    # Scanned layers alone have the others.
    is_dropped = form == "unscanned"
    return Case(layout, tree, back={**state, **of_layers} if is_dropped else tree)


def megatron_ranks(tp, pp, experts=""):
    """Tensors of Megatron's ranks; the last rows of the embedding are padding."""
    embed, mlp, d, kv, q, rows, ep = 10, 12, 4, 2, 3, 8, 2 if experts else 1
    layer = {
        "self_attention.linear_qkv.weight": (kv * (q + 2) * d // tp, embed),
        "self_attention.linear_proj.weight": (embed, kv * q * d // tp),
        "self_attention.linear_qkv.layer_norm_weight": (embed,),
    }
    layer |= (
        {"pre_mlp_layernorm.weight": (embed,), "mlp.router.weight": (2 * ep, embed)}
        if experts
        else {"mlp.linear_fc1.layer_norm_weight": (embed,)}
    )
    shapes = {"linear_fc1": (2 * mlp // tp, embed), "linear_fc2": (embed, mlp // tp)}
    for (leaf, shape), number in itertools.product(shapes.items(), range(ep)):
        of_expert = f"experts.{experts.format(number, leaf)}"
        layer[f"mlp.{of_expert if experts else f'{leaf}.weight'}"] = shape
    tensors, axes = [], {"pp": pp, "tp": tp, "ep": ep}
    axes = {axis: count for axis, count in axes.items() if count > 1}
    for at in np.ndindex(*axes.values()):
        ranks = dict(zip(axes, at, strict=True))
        places = itertools.product(range(2), layer)
        held = {f"decoder.layers.{n}.{name}": layer[name] for n, name in places}
        stage = ranks.get("pp", 0)
        if stage == 0:
            held["embedding.word_embeddings.weight"] = (rows, embed)
        if stage == pp - 1:
            held["output_layer.weight"] = (rows, embed)
            held["decoder.final_layernorm.weight"] = (embed,)
        for name, shape in held.items():
            # Ranks have the same norms and routers, and different parts of the others.
            is_same = "norm" in name or "router" in name
            own = {k: n for k, n in ranks.items() if k != "ep" or "experts." in name}
            seed = f"{name} { ({'pp': stage} if is_same else own) }".encode()
            rng = np.random.default_rng(zlib.crc32(seed))
            values = rng.standard_normal(shape, np.float32)
            tensors.append(saved(name, values, **ranks))
    sizes = {"kv": kv, "q": q, "vocab": tp * rows - 3}
    return Case(shipped.load("megatron_ranks_to_hf").with_sizes(sizes), tensors, axes)


def to_megatron():
    """From Hugging Face to Megatron's tensors over all ranks, and back."""
    sizes = {"vocab": small_models.VOCAB, "pad": 6}
    inverse = shipped.load("megatron_to_hf").with_sizes(sizes).inverse()
    layout = inverse.with_values(numbers("mixtral"))
    return Case(layout, hf("mixtral"), back=hf("mixtral"))


of = functools.partial
BLOCKS, FIRST = "stacked_blocks", {"first": 1, "second": 1}
# Names of experts, local and grouped: of a number and a leaf.
LOCAL, GROUPED = "local_experts.{}.{}.weight", "{1}.weight{0}"
# Their plain trees are like those of others.
TWICE = ("llama3.1", "gemma2", "llama4_scout")
CASES = {
    **{f"{family(n)}_to_maxtext: {n}": of(to_maxtext, n) for n in MODELS},
    **{f"{plain_layout(n)}: {n}": of(plain, n) for n in MODELS if n not in TWICE},
    "hf_phi4": phi,
    "hf_llama3, stacked": of(plain, "llama3", "stacked"),
    "hf_llama3, untied": of(plain, "llama3", "untied", without="lm_head.weight"),
    "hf_deepseek3, stacked_blocks": of(plain, "deepseek3", BLOCKS, block=1, first=2),
    "hf_llama4, stacked_blocks": of(plain, "llama4_maverick", BLOCKS, **FIRST),
    "hf_language_model, hf_gemma3": of(beside_vision, "gemma3"),
    "hf_gpt_oss, MXFP4": four_bits,
    "maxtext_unscanned_to_scanned": of(from_scanned, "unscanned"),
    **{
        f"maxtext_{form}_to_scanned": of(from_scanned, form, stage=2)
        for form in ("stages", "circular", "scanned_stages")
    },
    "megatron_to_hf, inverse": to_megatron,
    "megatron_ranks_to_hf": of(megatron_ranks, 2, 2),
    "megatron_ranks_to_hf, experts": of(megatron_ranks, 1, 2, LOCAL),
    "megatron_ranks_to_hf, grouped experts": of(megatron_ranks, 1, 1, GROUPED),
}
SIZES = {"vocab": 13, "kv": 2, "q": 2}
# What Megatron-core and DeepSpeed wrote, with the layout and its sizes.
LLAMA = ("megatron/torch_dist_tp2_pp2", "megatron_llama_to_maxtext")
EXPERTS = "megatron/torch_dist_ep2"
SAMPLES = [
    ("deepspeed/zero1_tp2_pp2_dp2", "deepspeed_example", {"vocab": 13}),
    *((*LLAMA, {**SIZES, "heads": 4, "interleave": n}) for n in (1, 2)),
    (EXPERTS, "megatron_mixtral_to_maxtext", SIZES),
    (EXPERTS, "megatron_to_hf", SIZES),
    (LLAMA[0], "megatron_to_hf", SIZES),
]


def check(name, made, request):
    """Compares a digest with the golden one, or writes it (--update-golden)."""
    digests = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    if request.config.getoption("--update-golden"):
        digests[name] = digest(made)
        DIGESTS.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
    assert digest(made) == digests[name], "see --update-golden"


@pytest.mark.parametrize("name", CASES)
def test_a_layout_makes_what_its_digest_says_and_comes_back(name, request):
    case = CASES[name]()
    made = relayout(case.layout, case.tensors, case.axes)
    check(name, made, request)
    if case.back is None:
        return
    assert case.layout.inverse().inverse() == case.layout
    back = relayout(case.layout.inverse(), made)
    for path, values in case.back.items():
        if case.rounded and case.rounded.search(path):
            np.testing.assert_allclose(back[path], values, rtol=0, atol=3e-7)
            back[path] = values
    assert_same(back, case.back)


@pytest.mark.parametrize(("name", "layout", "sizes"), SAMPLES)
def test_a_sample_becomes_what_its_digest_says(name, layout, sizes, sample, request):
    checkpoint = opening.open_checkpoint(sample(name))
    tensors = [
        saved(each.name, stored_values.read(each), each.kind, **dict(each.ranks))
        for each in checkpoint.tensors
    ]
    rules = shipped.load(layout).with_sizes(sizes).with_values(checkpoint.values)
    made = relayout(rules, tensors, checkpoint.axes)
    chosen = f", interleave {sizes['interleave']}" if "interleave" in sizes else ""
    check(f"{layout}, {name}{chosen}", made, request)


def test_every_shipped_layout_has_a_digest():
    tested = {name for case in CASES for name in re.findall(r"\w+", case)}
    tested |= {layout for _, layout, _ in SAMPLES}
    tested |= {
        os.path.basename(each.place).removesuffix(".yml")
        for name in tested & {*shipped.names()}
        for each in shipped.load(name).through
    }
    assert {*shipped.names()} - tested == ELSEWHERE


def test_the_bias_of_experts_comes_back_from_where_training_saves_it():
    layout = of_model("hf_deepseek3_to_maxtext_unscanned", "deepseek3")
    made = relayout(layout, hf("deepseek3"))
    trained = {
        re.sub("^params/params(.*gate/bias)$", r"nnx_aux/model\1", path): values
        for path, values in made.items()
    }
    assert trained.keys() != made.keys()
    rest = {
        "step": np.int32(1),
        "opt_state/0/mu/params/decoder/decoder_norm/scale": np.ones(3),
        "nnx_aux/model/decoder/rngs/params/count": np.uint32(1),
    }
    for each in (layout.inverse(), layout.inverse().weights()):
        assert_same(relayout(each, trained | rest), hf("deepseek3"))


def test_blocks_of_fp8_are_multiplied_by_their_scales():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(300, 192)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.normal(size=(3, 2)).astype(np.float32)
    tensors = {"a.weight": values, "a.weight_scale_inv": scales, "norm": scales}
    made = relayout(shipped.load("hf_fp8").with_values({}), tensors)
    each = scales.repeat(128, 0)[:300].repeat(128, 1)[:, :192]
    product = (values.astype(np.float32) * each).astype(ml_dtypes.bfloat16)
    assert_same(made, {"a.weight": product, "norm": scales})


@pytest.mark.parametrize("name", shipped.names())
def test_a_rule_for_all_other_names_may_have_none(name):
    rules = shipped.load(name).rules
    others = [each for each in rules[1:] if each.source[0].name == "{name:path}"]
    assert all(each.optional for each in others if each.source[0].dims == "...")
