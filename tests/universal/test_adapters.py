"""Adapters of PEFT open together with their bases, and are merged into them."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt import universal
from elastic_ckpt.cli import main
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.files import FormatError
from elastic_ckpt.universal.rules.layout import LayoutError
from elastic_ckpt.universal.writing.convert import Conversion, Job
from tests.universal import safetensors_files
from tests.universal.safetensors_files import bits

BFLOAT16 = ml_dtypes.bfloat16
PREFIX = "base_model.model."
QUERY, UP = "model.layers.0.q_proj", "model.layers.1.up_proj"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
MESH = jax.make_mesh((4, 2), ("data", "model"))
# The settings after the first are those of an adapter that has none of them.
UNCHANGED = {"lora_alpha": 0.7, "bias": "none", "alpha_pattern": {}, "use_dora": False}


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(shape).normal(size=shape).astype(dtype)


def model(dtype=BFLOAT16):
    shapes = {QUERY: (8, 12), UP: (16, 12), EMBEDDING: (24, 12), HEAD: (25, 12)}
    shapes |= {"model.norm": (12,)}
    made = {f"{name}.weight": numbers(*shapes[name], dtype=dtype) for name in shapes}
    return made | {f"{QUERY}.bias": numbers(8, dtype=dtype)}


def low_rank(name, out, inputs, rank):
    return {
        f"{PREFIX}{name}.lora_A.weight": numbers(rank, inputs),
        f"{PREFIX}{name}.lora_B.weight": numbers(out, rank),
    }


# The ranks of an adapter may differ.
PAIRS = low_rank(QUERY, 8, 12, 2) | low_rank(UP, 16, 12, 3)
LOW_EMBEDDING = {
    f"{PREFIX}{EMBEDDING}.lora_embedding_A": numbers(2, 24),
    f"{PREFIX}{EMBEDDING}.lora_embedding_B": numbers(12, 2),
}


def write(path, tensors, config, *, base=None, tied=False):
    """Writes an adapter, and `base` beside it."""
    (path / "adapter").mkdir(exist_ok=True)
    safetensors_files.write(path / "adapter/adapter_model.safetensors", tensors)
    config = {"base_model_name_or_path": "../base", "peft_type": "LORA", **config}
    (path / "adapter/adapter_config.json").write_text(json.dumps(config))
    if base is not None:
        (path / "base").mkdir(exist_ok=True)
        safetensors_files.write(path / "base/model.safetensors", base)
        config = {"heads": 4, "tie_word_embeddings": tied}
        (path / "base/config.json").write_text(json.dumps(config))
    return path / "adapter"


def merged(weight, b, a, scale):
    """The sum, in the order in which it is added."""
    total = weight.astype(np.float32)
    for column, row in zip(b.T, a, strict=True):
        total = total + scale * np.multiply.outer(column, row)
    return total.astype(weight.dtype)


def with_pairs(tensors, adapter, scale_of):
    """The tensors of a model with all pairs of an adapter merged."""
    made = dict(tensors)
    for name, a in adapter.items():
        module, _, kind = name.removeprefix(PREFIX).partition(".lora_")
        if "A" in kind:
            pair = a, adapter[name.replace("_A", "_B")]
            a, b = (each.T for each in pair[::-1]) if "embedding" in kind else pair
            weight = f"{module}.weight"
            made[weight] = merged(made[weight], b, a, scale_of(len(a)))
    return made


def converted(path, target, *options):
    assert main.main(["convert", *map(str, (path, target, *options))]) == 0
    return safetensors_files.read(target)


@pytest.mark.parametrize(
    ("dtype", "config", "scale_of"),
    [
        (np.float32, {"lora_alpha": 16}, lambda rank: 16 / rank),
        (BFLOAT16, {"lora_alpha": 16, "use_rslora": True}, lambda r: 16 / r**0.5),
        (np.float16, UNCHANGED, lambda rank: 0.7 / rank),
    ],
)
def test_a_product_of_each_pair_is_added(tmp_path, dtype, config, scale_of):
    base = model(dtype)
    path = write(tmp_path, PAIRS, config, base=base)
    (tmp_path / "base/tokenizer.json").write_text("{}")
    made = converted(path, tmp_path / "made", "--to", "hf")
    assert bits(made) == bits(with_pairs(base, PAIRS, scale_of))
    # The model has the other files of the base. The way back leaves the adapter out.
    written = json.loads((tmp_path / "made/config.json").read_text())
    assert written.items() >= {"heads": 4, "dtype": np.dtype(dtype).name}.items()
    assert (tmp_path / "made/tokenizer.json").exists()
    back = ("--to", "safetensors", "--rules", "lora", "--reverse")
    assert bits(converted(tmp_path / "base", tmp_path / "back", *back)) == bits(base)


def test_an_adapter_is_merged_on_the_way_into_sharded_arrays(tmp_path):
    names = [f"model.layers.{layer}.up" for layer in range(2)]
    base = {f"{name}.weight": numbers(16, 12, dtype=BFLOAT16) for name in names}
    pairs = low_rank(names[0], 16, 12, 2) | low_rank(names[1], 16, 12, 3)
    path = write(tmp_path, pairs, {"lora_alpha": 8}, base=base)
    rule = {
        "from": {"model.layers.{layer}.up.weight": "(heads d) embed"},
        "to": {"layers/{layer}/up/kernel": "embed heads d"},
    }
    sizes = {"d": {"value": "config/heads"}}
    (tmp_path / "family.yml").write_text(json.dumps({"rules": [rule], "sizes": sizes}))
    chain = {"version": 1, "through": ["lora", "family.yml", "stacked"]}
    (tmp_path / "chain.yml").write_text(json.dumps(chain))
    made = with_pairs(base, pairs, lambda rank: 8 / rank)
    kernel = np.stack([made[f"{name}.weight"].T for name in names])
    kernel = kernel.reshape(2, 12, 4, 4)
    sharding = jax.NamedSharding(MESH, jax.P(None, "data", "model"))
    tree = {"layers": {"up": {"kernel": jax.device_put(kernel, sharding)}}}
    state = universal.load(path, tree, layout=tmp_path / "chain.yml")
    assert state["layers"]["up"]["kernel"].sharding == sharding
    assert bits(state["layers"]["up"]) == bits({"kernel": kernel})


def test_embeddings_and_whole_modules_of_an_adapter_are_used(tmp_path):
    base = model()
    whole = {f"{HEAD}.weight": numbers(25, 12), "model.norm.weight": numbers(12)}
    adapter = low_rank(QUERY, 8, 12, 2) | LOW_EMBEDDING
    adapter |= {f"{PREFIX}{name}": values for name, values in whole.items()}
    path = write(tmp_path, adapter, {"lora_alpha": 2}, base=base)
    expected = with_pairs(base, adapter, lambda rank: 2 / rank) | whole
    # Without a layout, the leaves have the names of the base.
    state = universal.load(path, jax.device_put(expected))
    assert bits(state) == bits(expected)
    # PEFT also saves the base's weights of what it adapts.
    others = {name: -base[f"{name}.weight"] for name in (QUERY, EMBEDDING)}
    for name, values in others.items():
        adapter[f"{PREFIX}{name}.base_layer.weight"] = base[f"{name}.weight"] = values
    write(tmp_path, adapter, {"lora_alpha": 2})
    made = converted(path, tmp_path / "again", "--to", "safetensors")
    expected = with_pairs(base, adapter, lambda rank: 2 / rank) | whole
    assert bits(made) == bits(expected)


@pytest.mark.parametrize(
    ("config", "tensors", "text"),
    [
        ({"peft_type": None}, {}, "peft_type in the checkpoint is missing"),
        ({"fan_in_fan_out": True}, {}, "fan_in_fan_out in the checkpoint is True"),
        ({"alpha_pattern": {"q": 3}}, {}, "alpha_pattern/q in the checkpoint is 3"),
        ({"layer_replication": [[0, 1]]}, {}, "adapter/layer_replication"),
        ({}, low_rank("model.other", 8, 12, 2), "model.other"),
        ({}, {f"{PREFIX}{HEAD}.lora_A.weight": numbers(2, 12)}, HEAD),
        ({}, {f"{PREFIX}{HEAD}.lora_magnitude_vector": numbers(25)}, HEAD),
        ({}, low_rank(HEAD, 24, 12, 2), r"lora\.yml"),
        ({}, {f"{PREFIX}{HEAD}.weight": numbers(26, 12)}, r"lora\.yml"),
        ({}, LOW_EMBEDDING, "embed_tokens.*tie_word_embeddings"),
    ],
)
def test_what_is_no_product_of_two_matrices_is_refused(tmp_path, config, tensors, text):
    config = {"lora_alpha": 4, **config}
    # An embedding that is the head, too, is not adapted.
    tied = tensors is LOW_EMBEDDING
    path = write(tmp_path, PAIRS | tensors, config, base=model(), tied=tied)
    with pytest.raises(LayoutError, match=text):
        Conversion(Job(source=str(path), target=str(tmp_path / "made")))


def test_a_base_is_beside_its_adapter_or_absolute_or_an_error(tmp_path, monkeypatch):
    path = write(tmp_path, PAIRS, {}, base=model())
    monkeypatch.chdir(path)
    for base in ("../base", tmp_path / "base", "../base/model.safetensors", "../base/"):
        write(tmp_path, PAIRS, {"base_model_name_or_path": str(base)})
        for opened in map(opening.open_checkpoint, (path, ".")):
            assert {each.name for each in opened.tensors} == {*model(), *PAIRS}
    for base in (None, "../nowhere", "gs://bucket/base", "."):
        write(tmp_path, PAIRS, {"base_model_name_or_path": base})
        with pytest.raises(FormatError, match=str(path / "adapter_config.json")):
            opening.open_checkpoint(path)
