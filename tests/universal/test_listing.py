"""`elastic-ckpt convert` looks at a checkpoint: --list and --check."""

import json

import numpy as np
import pytest

from elastic_ckpt.cli import main
from tests.universal import safetensors_files
from tests.universal.rules.relayout import numbered

LAYOUT = """
version: 1
rules:
  - from: {"blocks.{n}.w": "out in"}
    to: {"layers/w": "n in out"}
  - from: {"norm": "x"}
    to: {"norm/scale": "x"}
"""
CONVERT = ("convert", "model.safetensors")
CHECK = (*CONVERT, "--rules", "layout.yml", "--check")
TREE = {"layers/w": [2, 4, 3], "norm/scale": {"shape": [4], "dtype": "bfloat16"}}


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = {f"blocks.{n}.w": numbered(3, 4) for n in range(2)}
    tensors["norm"] = np.ones(4, np.float32)
    safetensors_files.write(tmp_path / "model.safetensors", tensors)
    (tmp_path / "layout.yml").write_text(LAYOUT)
    (tmp_path / "tree.json").write_text(json.dumps(TREE))


def test_tensors_are_listed_by_patterns_of_names(tmp_path, capsys):
    more = {f"m.{n}.7.w": np.ones(2, np.int8) for n in (0, 1, 2, 5)}
    safetensors_files.write(tmp_path / "more.safetensors", more)
    assert main.main(["convert", "more.safetensors", "--list"]) == 0
    line = "m.{0-2,5}.7.w  [2] int8  4 tensors, 8 bytes"
    assert capsys.readouterr().out.splitlines() == [line]
    assert main.main([*CONVERT, "--list", "--json"]) == 0
    first, last = json.loads(capsys.readouterr().out)
    family = {"names": "blocks.{0-1}.w", "tensors": 2, "shape": [3, 4]}
    assert first == family | {"dtype": "float32", "kind": "parameter", "num_bytes": 96}
    assert (last["names"], last["shape"]) == ("norm", [4])


def test_a_check_shows_what_each_rule_makes_or_what_is_missing(tmp_path, capsys):
    for tree, num_bytes in (([], 16), (["tree.json"], 8)):
        assert main.main([*CHECK, *tree]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "layout.yml matches:",
            "  layout.yml: rules[0]: 2 tensors to 1, 96 bytes",
            f"  layout.yml: rules[1]: 1 tensors to 1, {num_bytes} bytes",
        ]
    assert main.main([*CHECK, "model.safetensors"]) == 1
    (tmp_path / "tree.json").write_text(json.dumps({**TREE, "layers/wo": [2, 4, 3]}))
    (tmp_path / "layout.yml").write_text(LAYOUT.replace('"norm"', '"normal"'))
    assert main.main([*CHECK, "tree.json"]) == 1
    error = capsys.readouterr().err
    assert all(text in error for text in ("norm", "layers/wo", "from['normal']"))
