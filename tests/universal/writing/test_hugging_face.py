"""Models that Hugging Face's `from_pretrained` loads, from any source and from runs."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.cli import main
from elastic_ckpt.universal.writing import convert
from tests.universal.safetensors_files import bits, read
from tests.universal.writing import small_model

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
W = np.arange(24, dtype=np.float32).reshape(6, 4)


def model(path, tensors, **config):
    small_model.write(path, tensors)
    (path / "config.json").write_text(json.dumps(config))


def exported(path, *options, target="made"):
    arguments = [path / "source", path / target, "--to", "hf", *options]
    return main.main(["convert", *map(str, arguments)])


def config_of(path):
    return json.loads((path / "config.json").read_bytes())


def test_a_model_is_written_with_all_that_is_beside_its_tensors(tmp_path):
    model(tmp_path / "source", {"w": W, "n": np.arange(3, dtype=np.int32)}, heads=2)
    kept = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    kept += ["vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja"]
    for name in [*kept, "tokenizer_of_mine.py", "README.md", "optimizer.pt"]:
        (tmp_path / "source" / name).write_text(name)
    (tmp_path / "source" / "tokenizer").mkdir()
    assert exported(tmp_path, "--dtype", "bfloat16") == 0
    made = tmp_path / "made"
    assert set(os.listdir(made)) == {*kept, "config.json", "model.safetensors"}
    assert all((made / name).read_text() == name for name in kept)
    assert config_of(made) == {"heads": 2, "dtype": "bfloat16"}
    tensors = read(made)
    assert tensors["w"].dtype.name == "bfloat16"
    np.testing.assert_array_equal(tensors["w"].astype(np.float32), W)
    assert tensors["n"].dtype == np.int32


def test_the_configuration_has_what_the_values_are(tmp_path):
    text = {"torch_dtype": "float16", "layers": 1}
    quantized = {"quant_method": "fp8"}
    fields = {"torch_dtype": "float16", "text_config": text, "vision_config": {"a": 1}}
    model(tmp_path / "source", {"w": W}, **fields, quantization_config=quantized)
    assert exported(tmp_path) == 0
    assert config_of(tmp_path / "made") == {
        "torch_dtype": "float32",
        "text_config": {"torch_dtype": "float32", "layers": 1},
        "vision_config": {"a": 1},
    }


@pytest.mark.parametrize("name", ["mlp.qweight", "mlp.weight_packed"])
def test_the_configuration_of_packed_weights_is_kept(tmp_path, name):
    packed = np.arange(6, dtype=np.int32).reshape(2, 3)
    config = {"torch_dtype": "float16", "quantization_config": {"bits": 4}}
    model(tmp_path / "source", {name: packed, "mlp.scales": W}, **config)
    assert exported(tmp_path) == 0
    assert config_of(tmp_path / "made") == config


def test_values_without_their_scales_are_not_cast(tmp_path, capsys):
    tensors = {"w": W.astype(ml_dtypes.float8_e4m3fn), "w_scale_inv": W[:1]}
    model(tmp_path / "source", tensors)
    assert exported(tmp_path, "--dtype", "bfloat16") == 1
    assert "w is float8_e4m3fn" in capsys.readouterr().err
    assert exported(tmp_path) == 0
    assert bits(read(tmp_path / "made")) == bits(tensors)


def test_an_output_that_is_the_embedding_is_left_out(tmp_path, capsys):
    tensors = {EMBEDDING: W, OUTPUT: W.copy(), "w": W}
    model(tmp_path / "source", tensors, tie_word_embeddings=True)
    assert exported(tmp_path) == 0
    assert read(tmp_path / "made").keys() == {EMBEDDING, "w"}
    tensors[OUTPUT][-1, -1] += 1
    small_model.write(tmp_path / "other", tensors)
    given = [tmp_path / "other", tmp_path / "wrong", "--to", "hf"]
    config = ["--config", tmp_path / "source"]
    assert main.main(["convert", *map(str, [*given, *config])]) == 1
    assert "lm_head.weight differs from model.embed" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


def test_an_output_is_compared_however_it_and_the_embedding_are_cut(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(convert, "CHUNK_BYTES", 8)
    rules = {EMBEDDING: ("v d", W), OUTPUT: ("d v", W.T.copy())}
    lines = [
        f'  - {{from: {{"{n}": "{dims}"}}, to: {{"{n}": "v d"}}}}'
        for n, (dims, _) in rules.items()
    ]
    (tmp_path / "rules.yml").write_text("\n".join(["version: 1", "rules:", *lines]))
    given = "--rules", tmp_path / "rules.yml"
    tensors = {name: values for name, (_, values) in rules.items()}
    model(tmp_path / "source", tensors, tie_word_embeddings=True)
    assert exported(tmp_path, *given) == 0
    assert bits(read(tmp_path / "made")) == bits({EMBEDDING: W})
    tensors[OUTPUT][-1, -1] += 1
    shutil.rmtree(tmp_path / "source")
    model(tmp_path / "source", tensors, tie_word_embeddings=True)
    assert exported(tmp_path, *given, target="wrong") == 1
    assert "lm_head.weight differs from model.embed" in capsys.readouterr().err


def test_an_output_that_is_missing_is_an_error(tmp_path, capsys):
    model(tmp_path / "source", {EMBEDDING: W}, tie_word_embeddings=False)
    assert exported(tmp_path) == 1
    assert "the output of the model would be random" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_a_dtype_without_floating_point_numbers_is_refused(tmp_path, capsys, dtype):
    model(tmp_path / "source", {"w": W})
    assert exported(tmp_path, "--dtype", dtype) == 1
    assert "give bfloat16" in capsys.readouterr().err


LAYOUT = """
version: 1
sizes: {kv: {value: config/kv}}
states:
  parameter: {from: "{}", to: "params/{}"}
  first_moment: {from: "first_moment/{}", to: "opt_state/0/mu/{}"}
rules:
  - from: {"w": "(kv d) embed"}
    to: {"w": "embed (d kv)"}
  - from: {"bias": "n"}
    to: {"aux/bias": "n"}
    kind: parameter
drop_inverse: ["aux/*/key"]
"""


def test_weights_come_back_from_a_run_by_the_layout_that_it_began_with(
    tmp_path, capsys
):
    (tmp_path / "rules.yml").write_text(LAYOUT)
    state = {
        "params": {"w": W.reshape(2, 3, 4).transpose(2, 1, 0).reshape(4, 6).copy()},
        "aux": {"bias": np.ones(3, np.float32), "rngs": {"key": np.zeros(2)}},
        "opt_state": [{"mu": {"w": W.T.copy()}, "count": np.zeros((), np.int32)}],
        "step": np.array(7, np.int32),
    }
    ocp.save_checkpointables(tmp_path / "run" / "7", {"state": state})
    model(tmp_path / "model", {"w": W}, kv=2)
    options = ["--rules", tmp_path / "rules.yml", "--reverse", "--to", "hf"]
    options += ["--config", tmp_path / "model"]

    def back(step, target, *more):
        given = [tmp_path / "run" / step, tmp_path / target, *options, *more]
        return main.main(["convert", *map(str, given)])

    assert back("7", "made") == 1
    assert "step" in capsys.readouterr().err
    assert back("7", "made", "--weights") == 0
    expected = {"w": W, "bias": state["aux"]["bias"]}
    assert bits(read(tmp_path / "made")) == bits(expected)
    # What is left over among the weights is an error as ever.
    state["params"]["other"] = W
    ocp.save_checkpointables(tmp_path / "run" / "8", {"state": state})
    assert back("8", "wrong", "--weights") == 1
    assert "params/other" in capsys.readouterr().err
