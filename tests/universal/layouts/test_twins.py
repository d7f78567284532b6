"""The digests are those of the trees that NumPy makes."""

import json
import re
import types

import numpy as np
import pytest

from tests.maxtext import small_models as small
from tests.universal.families import test_families, trees
from tests.universal.layouts import (
    hf_models,
    test_maxtext_families,
    test_maxtext_layouts,
    test_megatron_layouts,
    test_megatron_to_hf,
    test_stacked_layers,
)
from tests.universal.layouts import test_shipped_layouts as shipped
from tests.universal.rules.relayout import assert_same, digest, relayout

GOLDEN = json.loads(shipped.DIGESTS.read_text())
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "phi": "Phi3ForCausalLM",
}


@pytest.fixture
def as_small(monkeypatch):
    sizes = {
        "LAYERS": small.LAYERS,
        "EMBED": small.EMBED,
        "EXPERTS": small.EXPERTS,
        "KV": small.KV,
        "D": small.HEAD_DIM,
        "HEADS": small.HEADS,
        "Q": small.HEADS // small.KV,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(hf_models, name, size)


def tree_of(kind, name, arrays):
    config = small.hf_config(name)
    model = types.SimpleNamespace(architecture=ARCHITECTURES[kind], config=config)
    return trees.of(model, arrays)


def of_maxtext(name, form, arrays):
    if name in test_maxtext_families.BLOCKS:
        make = getattr(test_maxtext_families, "unscanned" if form else "scanned")
        return {f"params/params/{k}": v for k, v in make(name, arrays).items()}
    named = {"llama3": "llama", "qwen2.5": "qwen2"}.get(name, name)
    made = test_maxtext_layouts.maxtext(named, arrays)
    if form:
        layers = list(np.arange(small.LAYERS))
        made = test_stacked_layers.unstacked(made, "layers_{}", layers)
    return made


def twin(case, monkeypatch):
    name = case.partition(": ")[2]
    if "to_maxtext" in case:
        form = "_unscanned" if "_unscanned" in case else ""
        return of_maxtext(name, form, shipped.hf(name))
    if name:
        kind = small.hf_config(name)["model_type"]
        return tree_of(kind, name, shipped.hf(name))
    if case == "hf_phi4":
        return tree_of("phi", "llama3", shipped.phi().tensors)
    if case == "hf_llama3, stacked":
        tree = tree_of("llama", "llama3", shipped.hf("llama3"))
        return test_families.stacked(tree, {"layers": lambda _: True})
    if case == "hf_llama3, untied":
        arrays = dict(shipped.hf("llama3"))
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
        return tree_of("llama", "llama3", arrays)
    if "stacked_blocks" in case:
        name = "deepseek3" if "deepseek3" in case else "llama4_maverick"
        config = small.hf_config(name)
        tree = tree_of(config["model_type"], name, shipped.hf(name))
        length, first = (5, 2) if name == "deepseek3" else (2, 1)
        kinds = {
            "first_layers": lambda n: n % length < first,
            "second_layers": lambda n: n % length >= first,
        }
        made = test_families.stacked(tree, kinds)
        blocks = config["num_hidden_layers"] // length
        return {
            path: leaf.reshape(blocks, -1, *leaf.shape[1:])
            if path.partition("/")[0] in kinds
            else leaf
            for path, leaf in made.items()
        }
    if case == "hf_language_model, hf_gemma3":
        return tree_of("gemma3_text", "gemma3", shipped.hf("gemma3"))
    if case.startswith("maxtext_"):
        scanned = shipped.CASES[case]().tensors
        monkeypatch.setattr(test_stacked_layers, "STAGES", 2)
        monkeypatch.setattr(test_stacked_layers, "LOCAL", 3)
        back = shipped.CASES[case]().back
        return test_stacked_layers.unstacked(back, *test_stacked_layers.form(case))
    if case == "megatron_to_hf, inverse":
        monkeypatch.setattr(
            test_megatron_to_hf, "padded", lambda a: np.pad(a, ((0, 6), (0, 0)))
        )
        return test_megatron_to_hf.global_of(shipped.hf("mixtral"), "te_experts")
    return None


OTHERS = ("hf_gpt_oss, MXFP4", "megatron_ranks_to_hf")


@pytest.mark.parametrize(
    "case", [each for each in shipped.CASES if not each.startswith(OTHERS)]
)
def test_a_digest_is_that_of_the_twin(case, monkeypatch, as_small):
    made = twin(case, monkeypatch)
    made = {path: np.array(leaf, order="C") for path, leaf in made.items()}
    assert digest(made) == GOLDEN[case]


@pytest.mark.parametrize(
    "case", [each for each in shipped.CASES if each.startswith("megatron_ranks")]
)
def test_ranks_are_those_of_the_twin(case, monkeypatch):
    given = shipped.CASES[case]()
    made = relayout(given.layout, given.tensors, given.axes)
    assert digest(made) == GOLDEN[case]
    tp, pp = given.axes.get("tp", 1), given.axes.get("pp", 1)
    is_moe = "experts" in case
    for name, size in {
        "LAYERS": 2 * pp,
        "KV": 2,
        "EXPERTS": 4 if is_moe else 1,
    }.items():
        monkeypatch.setattr(hf_models, name, size)
    if is_moe:
        # The twin has one expert on each rank.
        stacked = test_megatron_to_hf.global_of(made, "te_experts")
        for tensor in given.tensors:
            if "expert" in tensor.name:
                ranks = dict(tensor.ranks)
                numbers = [int(n) for n in re.findall(r"(?<![c])\d+", tensor.name)]
                layer, expert = numbers[0], numbers[-1]
                leaf = "linear_fc1" if "fc1" in tensor.name else "linear_fc2"
                whole = stacked[f"decoder.layers.mlp.experts.experts.{leaf}.weight"]
                of_one = whole[2 * ranks.get("pp", 0) + layer, 2 * ranks["ep"] + expert]
                assert (of_one == tensor.values).all()
        return
    again, _ = test_megatron_to_hf.ranks_of(made, "te", tp=tp, pp=pp)
    made = {(each.name, each.ranks): each.values for each in again}
    expected = {(each.name, each.ranks): each.values for each in given.tensors}
    assert made.keys() == expected.keys()
    for key, values in expected.items():
        if "embedding" not in key[0] and "output" not in key[0]:
            assert (made[key] == values).all()
    table = np.concatenate(
        [
            expected["embedding.word_embeddings.weight", (("pp", 0), ("tp", n))]
            for n in (0, 1)
        ]
    )
    assert digest({"": table[:13]}) == digest(
        {
            "": relayout(given.layout, given.tensors, given.axes)[
                "model.embed_tokens.weight"
            ]
        }
    )


def test_four_bits_are_those_of_the_twin():
    given = shipped.four_bits()
    made = relayout(given.layout, given.tensors)
    import ml_dtypes

    arrays = dict(shipped.hf("gpt_oss"))
    for name in list(arrays):
        if f"{name}_blocks" in given.tensors:
            blocks, scales = (
                given.tensors[f"{name}_blocks"],
                given.tensors[f"{name}_scales"],
            )
            halves = np.stack([blocks & 15, blocks >> 4], axis=-1)
            numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
            numbers = numbers.reshape(*scales.shape, 4) * 2.0 ** (
                scales[..., None] - 127.0
            )
            experts, inputs, outputs = arrays[name].shape
            whole = numbers.reshape(experts, outputs, inputs).swapaxes(1, 2)
            arrays[name] = whole.astype(ml_dtypes.bfloat16)
    assert_same(made, tree_of("gpt_oss", "gpt_oss", arrays))
    assert digest(made) == GOLDEN["hf_gpt_oss, MXFP4"]


@pytest.mark.parametrize("interleave", [1, 2, None])
def test_samples_of_megatron_are_those_of_the_twin(interleave):
    layers, moe = (4, False) if interleave else (2, True)
    name = "megatron_llama_to_maxtext, torch_dist_tp2_pp2"
    name = (
        f"{name}, interleave {interleave}"
        if interleave
        else "megatron_mixtral_to_maxtext, torch_dist_ep2"
    )
    import pathlib
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        sample, layout, sizes = next(
            each
            for each in shipped.SAMPLES
            if each[2].get("interleave") == interleave and "maxtext" in each[1]
        )
        case = shipped.megatron_sample(sample, layout, pathlib.Path(directory), **sizes)
        made = relayout(case.layout, case.tensors, case.axes)
    assert digest(made) == GOLDEN[name]
    for prefix, (state, power) in test_megatron_layouts.STATES.items():
        expected = test_megatron_layouts.maxtext(
            state, power, layers, interleave=interleave, with_experts=moe
        )
        for path, array in expected.items():
            loaded = made[f"{prefix}/{path}"]
            if path == test_megatron_layouts.QUERY:
                np.testing.assert_array_max_ulp(
                    loaded, np.ascontiguousarray(array), maxulp=1
                )
            else:
                assert loaded.tobytes() == np.ascontiguousarray(array).tobytes(), path
