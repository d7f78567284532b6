"""The page about universal layouts works as it is written."""

import dataclasses
import pathlib
import re
import shlex

import numpy as np
import pytest

from elastic_ckpt import universal
from elastic_ckpt.cli import main
from elastic_ckpt.config import schema
from elastic_ckpt.universal.writing import convert
from tests.universal import safetensors_files
from tests.universal.formats import stored_values
from tests.universal.test_loading import numbers

ROOM = pathlib.Path(universal.__file__).parent
PAGE = (ROOM / "README.md").read_text()
BLOCKS = re.findall(r"```(yaml|python|sh)\n(.*?)```", PAGE, re.DOTALL)


def run(command):
    program, verb, *arguments = shlex.split(command)
    assert program == "elastic-ckpt"
    if verb != "train":
        assert main.main([verb, *arguments]) == 0, command
        return
    keys = {argument.partition("=")[0] for argument in arguments[1:]}
    assert keys <= {field.name for field in dataclasses.fields(schema.ModelSection)}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_the_blocks_load_and_convert_the_same_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = {
        f"layers.{layer}.up.weight": numbers(32, 16, seed=layer) for layer in range(3)
    }
    tensors["embedding.weight"] = numbers(64, 16, seed=9)
    (tmp_path / "model").mkdir()
    safetensors_files.write(tmp_path / "model" / "model.safetensors", tensors)
    sample = stored_values.unpacked("deepspeed/zero1_dp2.tar.xz", tmp_path)
    sample.rename(tmp_path / "deepspeed_run")
    expected = np.stack([tensors[f"layers.{n}.up.weight"].T for n in range(3)])
    names, loads = {}, 0
    for language, block in BLOCKS:
        if language == "yaml":
            (tmp_path / "layout.yml").write_text(block)
        elif language == "sh":
            for command in block.splitlines():
                run(command)
        else:
            exec(compile(block, "README.md", "exec"), names)
            up = np.asarray(names["state"]["params"]["layers"]["up"])
            assert up.tobytes() == expected.tobytes()
            loads += 1
    assert loads == 2
    back = stored_values.by_key(universal.open_checkpoint(tmp_path / "back"))
    for name, array in tensors.items():
        values = stored_values.read(back[name, "parameter", ()])
        assert values.tobytes() == array.tobytes(), name
    assert (tmp_path / "universal" / "latest_universal").exists()


def test_the_table_has_the_formats_that_are_written():
    assert set(re.findall(r"\| `--to (\w+)` \|", PAGE)) == set(convert.FORMATS)
