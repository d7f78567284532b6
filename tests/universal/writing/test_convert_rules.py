"""Conversions without rules, by rules that ship, and with sizes."""

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.cli import main
from elastic_ckpt.universal.formats import safetensors_file
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.maxtext import small_models
from tests.universal.writing import small_model

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

LAYOUT = """
version: 1
rules:
  - from: {"w": "(kv d) embed"}
    to: {"params/w": "embed kv d"}
"""


def converted(*arguments):
    return main.main(["convert", *map(str, arguments)])


def tensors_of(directory):
    return safetensors_file.read(directory / "model.safetensors")


def assert_same(arrays, expected):
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype, name
        assert arrays[name].tobytes() == array.tobytes(), name


def test_a_layout_that_ships_takes_its_sizes_from_the_command(tmp_path, capsys):
    tensors = small_models.tensors("llama3")
    small_model.write(tmp_path / "source", tensors)
    given = [tmp_path / "source", tmp_path / "steps" / "0", "--dry-run"]
    rules = ["--rules", "hf_llama_to_maxtext"]
    assert converted(*given, *rules) == 1
    assert "size" in capsys.readouterr().err
    assert converted(*given, *rules, "--size", "d=14") == 1
    assert "--size interleave=1" in capsys.readouterr().err
    sizes = ["--size", "interleave=2", "--size", "d=14"]
    assert converted(*given, *rules, *sizes) == 0
    assert f"safetensors: {len(tensors)} tensors" in capsys.readouterr().out


def test_sizes_and_leaves_are_values_of_the_checkpoint_unless_given(tmp_path, capsys):
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    small_model.write(tmp_path / "source", {"w": values})
    (tmp_path / "source" / "config.json").write_text('{"kv": 2, "steps": 7}')
    (tmp_path / "layout.yml").write_text(
        LAYOUT.replace("rules:", "sizes: {kv: {value: config/kv}}\nrules:")
        + "fill: {step: {value: config/steps}, scale: 0.5}\n"
    )
    rules = ["--rules", tmp_path / "layout.yml"]
    assert converted(tmp_path / "source", tmp_path / "steps" / "0", *rules) == 0
    to = ["--to", "safetensors"]
    assert converted(tmp_path / "steps" / "0", tmp_path / "made", *to) == 0
    leaves = {"step": np.array(7, np.int32), "scale": np.array(0.5, np.float32)}
    w = values.reshape(2, 3, 4).transpose(2, 0, 1).copy()
    assert_same(tensors_of(tmp_path / "made"), {"params/w": w, **leaves})
    given = [tmp_path / "source", tmp_path / "three", *to, *rules]
    assert converted(*given, "--size", "kv=3") == 0
    w = values.reshape(3, 2, 4).transpose(2, 0, 1).copy()
    assert_same(tensors_of(tmp_path / "three"), {"params/w": w, **leaves})
    (tmp_path / "source" / "config.json").unlink()
    capsys.readouterr()
    given[1] = tmp_path / "none"
    assert converted(*given) == 1
    assert "layout.yml, line 3: sizes['kv']: the checkpoint has no value config/kv" in (
        capsys.readouterr().err
    )
    assert converted(*given, "--size", "kv=3") == 1
    assert "line 7: fill['step']: the checkpoint has no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "there", "back"),
    [
        ("tree: items", "items", "state"),
        ("tree: {from: a, to: b-2}", "b-2", "a"),
    ],
)
def test_the_tree_of_a_step_is_named_by_the_layout(tmp_path, line, there, back):
    values = np.arange(24, dtype=np.float32).reshape(6, 4)
    small_model.write(tmp_path / "source", {"w": values})
    (tmp_path / "layout.yml").write_text(f"{LAYOUT}\n{line}\n")
    rules = ["--rules", tmp_path / "layout.yml", "--size", "kv=2"]
    assert converted(tmp_path / "source", tmp_path / "steps" / "0", *rules) == 0
    tree = ocp.load(tmp_path / "steps" / "0", checkpointable_name=there)
    made = tree["params"]["w"]
    np.testing.assert_array_equal(made, values.reshape(2, 3, 4).transpose(2, 0, 1))
    rules += ["--reverse"]
    assert converted(tmp_path / "steps" / "0", tmp_path / "back" / "0", *rules) == 0
    tree = ocp.load(tmp_path / "back" / "0", checkpointable_name=back)
    np.testing.assert_array_equal(tree["w"], values)


@pytest.mark.parametrize("name", ["..", "_x"])
def test_a_tree_cannot_have_the_name_of_another_directory(name):
    with pytest.raises(LayoutError, match="line 7"):
        Layout.parse(f"{LAYOUT}\ntree: {name}\n")


LISTS = """
version: 1
rules:
  - from: {"{name:path}": "x"}
    to: {"{name:path}": "x"}
lists: [opt, opt/2/inner, other]
"""


def test_trees_of_orbax_are_lists_where_the_layout_lists_them(tmp_path, capsys):
    tensors = {
        name: np.full(3, number, np.float32)
        for number, name in enumerate(["opt/0/mu", "opt/2/inner/1", "dict/0"])
    }
    small_model.write(tmp_path / "source", tensors)
    (tmp_path / "lists.yml").write_text(LISTS)
    rules = ["--rules", tmp_path / "lists.yml"]
    assert converted(tmp_path / "source", tmp_path / "steps" / "0", *rules) == 0
    tree = ocp.load(tmp_path / "steps" / "0", checkpointable_name="state")
    shape = jax.tree.map(lambda each: int(each[0]), tree)
    assert shape == {
        "opt": [{"mu": 0}, None, {"inner": [None, 1]}],
        "dict": {"0": 2},
    }
    to = ["--to", "safetensors"]
    assert converted(tmp_path / "steps" / "0", tmp_path / "back", *to) == 0
    assert_same(tensors_of(tmp_path / "back"), tensors)
    small_model.write(tmp_path / "wrong", {"other/x": np.ones(3, np.float32)})
    assert converted(tmp_path / "wrong", tmp_path / "other" / "0", *rules) == 1
    assert "other is listed in `lists`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--size", "kv=2"], "give --rules"),
        (["--reverse"], "give --rules"),
        (["--rules", "llama"], "hf_llama_to_maxtext"),
    ],
)
def test_options_that_do_not_fit_are_one_error(tmp_path, capsys, options, match):
    small_model.write(tmp_path / "source", {"w": np.ones((6, 4), np.float32)})
    assert converted(tmp_path / "source", tmp_path / "0", *options) == 1
    assert match in capsys.readouterr().err
