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
TREE = {"layers/w": [2, 4, 3], "norm/scale": [4]}


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = {
        "blocks.0.w": numbered(3, 4),
        "blocks.1.w": numbered(3, 4),
        "norm": np.ones(4, np.float32),
    }
    safetensors_files.write(tmp_path / "model.safetensors", tensors)
    (tmp_path / "layout.yml").write_text(LAYOUT)
    (tmp_path / "tree.json").write_text(json.dumps(TREE))


def looked(*arguments):
    return main.main(["convert", "model.safetensors", *arguments])


def test_tensors_are_listed_by_patterns_of_names(capsys):
    assert looked("--list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "blocks.{0-1}.w  [3, 4] float32  2 tensors, 96 bytes",
        "norm  [4] float32  1 tensors, 16 bytes",
    ]
    assert looked("--list", "--json") == 0
    first, _ = json.loads(capsys.readouterr().out)
    assert first == {
        "names": "blocks.{0-1}.w",
        "tensors": 2,
        "shape": [3, 4],
        "dtype": "float32",
        "kind": "parameter",
        "num_bytes": 96,
    }


def test_a_check_shows_what_each_rule_makes(capsys):
    for tree in ([], ["tree.json"]):
        assert looked("--rules", "layout.yml", "--check", *tree) == 0
        assert capsys.readouterr().out.splitlines() == [
            "layout.yml fits:",
            "  layout.yml: rules[0]: 2 tensors to 1, 96 bytes",
            "  layout.yml: rules[1]: 1 tensors to 1, 16 bytes",
        ]
    assert looked("--rules", "layout.yml", "--check", "--json") == 0
    first, _ = json.loads(capsys.readouterr().out)
    assert (first["sources"], first["targets"]) == (2, 1)


def test_a_check_shows_what_is_missing_with_the_nearest_rule(tmp_path, capsys):
    tree = {**TREE, "layers/wo": [2, 4, 3]}
    (tmp_path / "tree.json").write_text(json.dumps(tree))
    (tmp_path / "layout.yml").write_text(LAYOUT.replace('"norm"', '"normal"'))
    assert looked("--rules", "layout.yml", "--check", "tree.json") == 1
    error = capsys.readouterr().err
    assert "in no rule: norm (nearest: 'normal', layout.yml: rules[1])" in error
    assert "layers/wo (nearest: 'layers/w', layout.yml:" in error
    assert "from['normal'], the nearest is 'norm'" in error
