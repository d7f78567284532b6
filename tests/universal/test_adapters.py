"""Adapters of PEFT open together with their bases, and are merged into them."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt import universal
from elastic_ckpt.cli import main
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.writing.convert import Conversion, Job
from tests.universal import safetensors_files
from tests.universal.safetensors_files import bits

BFLOAT16 = ml_dtypes.bfloat16
PREFIX = "base_model.model."
QUERY, UP = "model.layers.0.q_proj", "model.layers.1.up_proj"
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
MESH = jax.make_mesh((4, 2), ("data", "model"))


def numbers(*shape, dtype=np.float32):
    generator = np.random.default_rng(shape)
    return generator.normal(size=shape).astype(dtype)


def model(dtype=BFLOAT16):
    """The tensors of a base."""
    return {
        f"{QUERY}.weight": numbers(8, 12, dtype=dtype),
        f"{QUERY}.bias": numbers(8, dtype=dtype),
        f"{UP}.weight": numbers(16, 12, dtype=dtype),
        f"{EMBEDDING}.weight": numbers(24, 12, dtype=dtype),
        f"{HEAD}.weight": numbers(25, 12, dtype=dtype),
        "model.norm.weight": numbers(12, dtype=dtype),
    }


def low_rank(name, out, inputs, rank):
    a, b = numbers(rank, inputs), numbers(out, rank)
    names = (f"{PREFIX}{name}.lora_A.weight", f"{PREFIX}{name}.lora_B.weight")
    return dict(zip(names, (a, b), strict=True))


def pairs():
    """The tensors of an adapter, whose ranks differ."""
    return low_rank(QUERY, 8, 12, 2) | low_rank(UP, 16, 12, 3)


def write(path, tensors, config, *, base=None, **options):
    """Writes an adapter, and `base` beside it."""
    (path / "adapter").mkdir(exist_ok=True)
    safetensors_files.write(path / "adapter/adapter_model.safetensors", tensors)
    config = {"base_model_name_or_path": "../base", "peft_type": "LORA", **config}
    (path / "adapter/adapter_config.json").write_text(json.dumps(config | options))
    if base is not None:
        (path / "base").mkdir(exist_ok=True)
        safetensors_files.write(path / "base/model.safetensors", base)
        config = {"heads": 4, "tie_word_embeddings": False}
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
        if name.endswith(".lora_A.weight"):
            weight = name.removeprefix(PREFIX).replace(".lora_A", "")
            b = adapter[name.replace("_A", "_B")]
            made[weight] = merged(made[weight], b, a, scale_of(len(a)))
    return made


def sharding_of(*spec):
    return jax.NamedSharding(MESH, jax.P(*spec))


def converted(path, target, *options):
    assert main.main(["convert", *map(str, (path, target, *options))]) == 0
    return safetensors_files.read(target)


# What changes nothing.
PLAIN = {
    "bias": "none",
    "alpha_pattern": {},
    "rank_pattern": {UP: 3},
    "use_dora": False,
    "target_parameters": [],
    "init_lora_weights": "gaussian",
    "layer_replication": None,
}


@pytest.mark.parametrize(
    ("dtype", "config", "scale_of"),
    [
        (np.float32, {"lora_alpha": 16}, lambda rank: 16 / rank),
        (BFLOAT16, {"lora_alpha": 16, "use_rslora": True}, lambda r: 16 / r**0.5),
        (np.float16, {"lora_alpha": 0.7, **PLAIN}, lambda rank: 0.7 / rank),
    ],
)
def test_a_product_of_each_pair_is_added(tmp_path, dtype, config, scale_of):
    base, adapter = model(dtype), pairs()
    path = write(tmp_path, adapter, config, base=base)
    made = converted(path, tmp_path / "made", "--to", "safetensors")
    expected = with_pairs(base, adapter, scale_of)
    assert bits(made) == bits(expected)
    # As PEFT has it, but for the order of the sum.
    b, a = (adapter[f"{PREFIX}{UP}.lora_{each}.weight"] for each in "BA")
    at_once = base[f"{UP}.weight"].astype(np.float32) + scale_of(3) * (b @ a)
    least = max(2.0**-20, float(ml_dtypes.finfo(dtype).eps))
    made_of_up = made[f"{UP}.weight"].astype(np.float32)
    np.testing.assert_allclose(made_of_up, at_once, least, least)


def test_an_adapter_is_merged_on_the_way_into_sharded_arrays(tmp_path):
    names = [f"model.layers.{layer}.up" for layer in range(2)]
    base = {f"{name}.weight": numbers(16, 12, dtype=BFLOAT16) for name in names}
    base["model.norm.weight"] = numbers(12)
    adapter = {}
    for rank, name in enumerate(names, start=2):
        adapter |= low_rank(name, 16, 12, rank)
    path = write(tmp_path, adapter, {"lora_alpha": 8}, base=base)
    ups = {
        "from": {"model.layers.{layer}.up.weight": "(heads d) embed"},
        "to": {"layers/{layer}/up/kernel": "embed heads d"},
    }
    norm = {"from": {"model.norm.weight": "x"}, "to": {"norm": "x"}}
    family = {
        "version": 1,
        "rules": [ups, norm],
        "sizes": {"d": {"value": "config/heads"}},
    }
    (tmp_path / "family.yml").write_text(json.dumps(family))
    chain = {"version": 1, "through": ["lora", "family.yml", "stacked"]}
    (tmp_path / "chain.yml").write_text(json.dumps(chain))
    sharding = sharding_of(None, "data", "model")
    leaf = jax.ShapeDtypeStruct((2, 12, 4, 4), BFLOAT16, sharding=sharding)
    norm = jax.ShapeDtypeStruct((12,), np.float32, sharding=sharding_of())
    tree = {"layers": {"up": {"kernel": leaf}}, "norm": norm}
    state = universal.load(path, tree, layout=tmp_path / "chain.yml")
    made = with_pairs(base, adapter, lambda rank: 8 / rank)
    expected = np.stack([made[f"{name}.weight"].T for name in names])
    up = np.asarray(state["layers"]["up"]["kernel"])
    assert up.tobytes() == expected.reshape(2, 12, 4, 4).tobytes()


def test_a_load_without_a_layout_merges_by_the_names_of_the_base(tmp_path):
    base, adapter = model(np.float32), pairs()
    path = write(tmp_path, adapter, {"lora_alpha": 4}, base=base)
    tree = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding_of())
        for name, each in base.items()
    }
    state = universal.load(path, tree)
    expected = with_pairs(base, adapter, lambda rank: 4 / rank)
    assert bits(state) == bits(expected)


def test_embeddings_and_whole_modules_of_an_adapter_are_used(tmp_path):
    base = model()
    # As PEFT saves it: with the embedding that it adapts, and a head of another type.
    embedding = numbers(24, 12, dtype=BFLOAT16) + BFLOAT16(1)
    a, b = numbers(2, 24), numbers(12, 2)
    adapter = low_rank(QUERY, 8, 12, 2) | {
        f"{PREFIX}{EMBEDDING}.lora_embedding_A": a,
        f"{PREFIX}{EMBEDDING}.lora_embedding_B": b,
        f"{PREFIX}{HEAD}.weight": numbers(25, 12),
        f"{PREFIX}model.norm.weight": numbers(12),
    }
    path = write(tmp_path, adapter, {"lora_alpha": 2}, base=base)
    made = converted(path, tmp_path / "made", "--to", "safetensors")
    expected = with_pairs(base, adapter, lambda rank: 2 / rank) | {
        f"{EMBEDDING}.weight": merged(base[f"{EMBEDDING}.weight"], a.T, b.T, 1),
        f"{HEAD}.weight": adapter[f"{PREFIX}{HEAD}.weight"],
        "model.norm.weight": adapter[f"{PREFIX}model.norm.weight"],
    }
    assert bits(made) == bits(expected)
    adapter[f"{PREFIX}{EMBEDDING}.base_layer.weight"] = embedding
    adapter[f"{PREFIX}{QUERY}.base_layer.weight"] = -base[f"{QUERY}.weight"]
    write(tmp_path, adapter, {"lora_alpha": 2})
    made = converted(path, tmp_path / "again", "--to", "safetensors")
    expected[f"{EMBEDDING}.weight"] = merged(embedding, a.T, b.T, 1)
    others = {**base, f"{QUERY}.weight": -base[f"{QUERY}.weight"]}
    query = with_pairs(others, low_rank(QUERY, 8, 12, 2), lambda _: 1)
    expected[f"{QUERY}.weight"] = query[f"{QUERY}.weight"]
    assert bits(made) == bits(expected)


def test_a_merged_model_has_the_configuration_of_the_base(tmp_path):
    base, adapter = model(), pairs()
    path = write(tmp_path, adapter, {"lora_alpha": 4}, base=base)
    (tmp_path / "base/tokenizer.json").write_text("{}")
    made = converted(path, tmp_path / "made", "--to", "hf")
    assert bits(made) == bits(with_pairs(base, adapter, lambda rank: 4 / rank))
    config = json.loads((tmp_path / "made/config.json").read_text())
    assert config.items() >= {"heads": 4, "dtype": "bfloat16"}.items()
    assert (tmp_path / "made/tokenizer.json").exists()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peft_type": "LOHA"}, "adapter/peft_type in the checkpoint is 'LOHA'"),
        ({"peft_type": None}, "adapter/peft_type in the checkpoint is missing"),
        ({"bias": "all"}, "adapter/bias in the checkpoint is 'all'"),
        ({"fan_in_fan_out": True}, "adapter/fan_in_fan_out in the checkpoint is True"),
        ({"alpha_pattern": {"q": 3}}, "is 3 at adapter/alpha_pattern/q"),
        ({"layer_replication": [[0, 1]]}, "is .* at adapter/layer_replication/0"),
    ],
)
def test_what_a_product_alone_does_not_make_is_refused(tmp_path, config, text):
    path = write(tmp_path, pairs(), {"lora_alpha": 4}, base=model(), **config)
    with pytest.raises(LayoutError, match=rf"lora\.yml: .*{text}.* has to be"):
        Conversion(Job(source=str(path), target=str(tmp_path / "made")))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (low_rank("model.other", 8, 12, 2), "all that it needs: .*other.lora_A"),
        ({f"{PREFIX}{HEAD}.lora_A.weight": numbers(2, 12)}, "it needs: .*lora_A"),
        ({f"{PREFIX}{HEAD}.lora_B.bias": numbers(25)}, "it needs: .*lora_B.bias"),
        ({f"{PREFIX}{HEAD}.lora_magnitude_vector": numbers(25)}, "magnitude_vector"),
        ({"base_model.head.weight": numbers(2)}, "it needs: base_model.head.weight"),
        (low_rank(HEAD, 24, 12, 2), "shapes of the checkpoint"),
        ({f"{PREFIX}{HEAD}.weight": numbers(26, 12)}, "shapes of the checkpoint"),
    ],
)
def test_no_tensor_of_an_adapter_is_left_out(tmp_path, tensors, text):
    given = {**pairs(), f"{PREFIX}model.norm.weight": numbers(12), **tensors}
    path = write(tmp_path, given, {"lora_alpha": 4}, base=model())
    with pytest.raises(LayoutError, match=text):
        Conversion(Job(source=str(path), target=str(tmp_path / "made")))


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("lora_embedding_A", {}),
        ("base_layer.weight", {"tie_word_embeddings": True}),
        ("weight", {"tie_word_embeddings": True}),
    ],
)
def test_an_embedding_that_is_the_head_too_is_not_adapted(tmp_path, tied, name):
    low = {"lora_embedding_A": numbers(2, 24), "lora_embedding_B": numbers(12, 2)}
    low |= {"base_layer.weight": numbers(24, 12)} if name != "lora_embedding_A" else {}
    held = {"weight": numbers(24, 12)} if name == "weight" else low
    adapter = {f"{PREFIX}{EMBEDDING}.{each}": values for each, values in held.items()}
    path = write(tmp_path, pairs() | adapter, {"lora_alpha": 4}, base=model())
    job = Job(source=str(path), target=str(tmp_path / "made"))
    Conversion(job)
    (tmp_path / "base/config.json").write_text(json.dumps({"heads": 4, **tied}))
    text = r"embed_tokens.*tie_word_embeddings .* is \w+, and has to be False"
    with pytest.raises(LayoutError, match=text):
        Conversion(job)
    write(tmp_path, pairs(), {"lora_alpha": 4})
    Conversion(job)


def test_the_way_back_leaves_the_adapter_out(tmp_path):
    base = model()
    write(tmp_path, pairs(), {"lora_alpha": 4}, base=base)
    options = ("--to", "safetensors", "--rules", "lora", "--reverse")
    made = converted(tmp_path / "base", tmp_path / "made", *options)
    assert bits(made) == bits(base)


def opened(path):
    return {each.name for each in opening.open_checkpoint(path).tensors}


def test_a_base_is_beside_its_adapter_or_at_an_absolute_path(tmp_path, monkeypatch):
    path = write(tmp_path, pairs(), {}, base=model())
    both = {*model(), *pairs()}
    assert opened(path) == both
    for base in (tmp_path / "base", "../base/model.safetensors", "./../base/"):
        write(tmp_path, pairs(), {"base_model_name_or_path": str(base)})
        assert opened(path) == both
    monkeypatch.chdir(path)
    assert opened(".") == both


@pytest.mark.parametrize(
    ("base", "text"),
    [
        (None, "has no base_model_name_or_path; set"),
        ("../nowhere", "'../nowhere', which is no directory here: .*; or set"),
        ("gs://bucket/base", "which is no directory here"),
        (".", "is an adapter, too; convert it first"),
    ],
)
def test_a_base_that_is_not_here_is_one_error(tmp_path, base, text):
    path = write(tmp_path, pairs(), {"base_model_name_or_path": base}, base=model())
    with pytest.raises(FormatError, match=text) as caught:
        opening.open_checkpoint(path)
    assert "there to the path of the model" in str(caught.value)
    assert str(path / "adapter_config.json") in str(caught.value)
