"""Models that Hugging Face's `from_pretrained` loads, from any source and from runs."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.universal.writing import convert
from tests.universal.safetensors_files import bits, read
from tests.universal.writing import small_model
from tests.universal.writing.small_model import converted, refusal

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
W = np.arange(24, dtype=np.float32).reshape(6, 4)


def model(path, tensors, **config):
    small_model.write(path, tensors)
    (path / "config.json").write_text(json.dumps(config))


def exported(path, *options):
    return [path / "source", path / "made", "--to", "hf", *options]


def config_of(path):
    return json.loads((path / "config.json").read_bytes())


def test_a_model_is_written_with_all_that_is_beside_its_tensors(tmp_path):
    tensors = {EMBEDDING: W, OUTPUT: W, "n": np.arange(3, dtype=np.int32)}
    model(tmp_path / "source", tensors, tie_word_embeddings=True)
    kept = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    kept += ["vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja"]
    for name in [*kept, "tokenizer_of_mine.py", "README.md", "optimizer.pt"]:
        (tmp_path / "source" / name).write_text(name)
    (tmp_path / "source" / "tokenizer").mkdir()
    assert converted(*exported(tmp_path, "--dtype", "bfloat16")) == 0
    made = tmp_path / "made"
    assert set(os.listdir(made)) == {*kept, "config.json", "model.safetensors"}
    assert all((made / name).read_text() == name for name in kept)
    assert config_of(made) == {"tie_word_embeddings": True, "dtype": "bfloat16"}
    # An output that is the embedding is left out.
    del tensors[OUTPUT]
    tensors[EMBEDDING] = W.astype(ml_dtypes.bfloat16)
    assert bits(read(made)) == bits(tensors)


def test_the_configuration_has_what_the_values_are(tmp_path):
    text = {"torch_dtype": "float16", "layers": 1}
    quantized = {"quant_method": "fp8"}
    fields = {"torch_dtype": "float16", "text_config": text, "vision_config": {"a": 1}}
    model(tmp_path / "source", {"w": W}, **fields, quantization_config=quantized)
    assert converted(*exported(tmp_path)) == 0
    text["torch_dtype"] = fields["torch_dtype"] = "float32"
    assert config_of(tmp_path / "made") == fields


@pytest.mark.parametrize("name", ["mlp.qweight", "mlp.weight_packed"])
def test_the_configuration_of_packed_weights_is_kept(tmp_path, name):
    packed = np.arange(6, dtype=np.int32).reshape(2, 3)
    config = {"torch_dtype": "float16", "quantization_config": {"bits": 4}}
    model(tmp_path / "source", {name: packed, "mlp.scales": W}, **config)
    assert converted(*exported(tmp_path)) == 0
    assert config_of(tmp_path / "made") == config


def test_an_output_is_compared_however_it_and_the_embedding_are_cut(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(convert, "CHUNK_BYTES", 8)
    rules = [{"from": {EMBEDDING: "v d"}, "to": {EMBEDDING: "v d"}}]
    rules += [{"from": {OUTPUT: "d v"}, "to": {OUTPUT: "v d"}}]
    (tmp_path / "rules.yml").write_text(json.dumps({"version": 1, "rules": rules}))
    given = exported(tmp_path, "--rules", tmp_path / "rules.yml")
    tensors = {EMBEDDING: W, OUTPUT: W.T.copy()}
    model(tmp_path / "source", tensors, tie_word_embeddings=True)
    assert converted(*given) == 0
    assert bits(read(tmp_path / "made")) == bits({EMBEDDING: W})
    tensors[OUTPUT][-1, -1] += 1
    shutil.rmtree(tmp_path / "source")
    shutil.rmtree(tmp_path / "made")
    model(tmp_path / "source", tensors, tie_word_embeddings=True)
    assert "lm_head.weight differs from model.embed" in refusal(capsys, *given)


FP8 = {"w": W.astype(ml_dtypes.float8_e4m3fn), "w_scale_inv": W[:1]}


@pytest.mark.parametrize(
    ("tensors", "is_tied", "options", "problem"),
    [
        ({EMBEDDING: W, OUTPUT: -W}, True, [], "lm_head.weight differs from model.emb"),
        ({EMBEDDING: W}, False, [], "the output of the model would be random"),
        ({"w": W}, False, ["--dtype", "int8"], "give bfloat16"),
        ({"w": W}, False, ["--dtype", "bf16"], "give bfloat16"),
        (FP8, False, ["--dtype", "bfloat16"], "w is float8_e4m3fn"),
    ],
)
def test_what_is_no_model_is_refused(
    tmp_path, capsys, tensors, is_tied, options, problem
):
    model(tmp_path / "source", tensors, tie_word_embeddings=is_tied)
    assert problem in refusal(capsys, *exported(tmp_path, *options))
    assert not (tmp_path / "made").exists()


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
        return [tmp_path / "run" / step, tmp_path / target, *options, *more]

    assert "step" in refusal(capsys, *back("7", "made"))
    assert converted(*back("7", "made", "--weights")) == 0
    expected = {"w": W, "bias": state["aux"]["bias"]}
    assert bits(read(tmp_path / "made")) == bits(expected)
    # What is left over among the weights is an error as ever.
    state["params"]["other"] = W
    ocp.save_checkpointables(tmp_path / "run" / "8", {"state": state})
    assert "params/other" in refusal(capsys, *back("8", "wrong", "--weights"))
