"""Checkpoints are converted to other layouts and formats, also after a kill."""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.cli import main
from elastic_ckpt.core import errors, process
from elastic_ckpt.tiers.persistent import claims
from elastic_ckpt.universal.rules.layout import Layout, LayoutError
from elastic_ckpt.universal.writing import (
    convert,
)
from tests import runs, seams
from tests.maxtext import small_models
from tests.universal.safetensors_files import bits, read
from tests.universal.writing import small_model

TREES = ("orbax", "safetensors")
SLOW = pytest.mark.slow


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A model whose targets have several chunks each."""
    monkeypatch.setattr(convert, "CHUNK_BYTES", 2**12)
    monkeypatch.setattr(convert, "_BUDGET_BYTES", 2**14)
    monkeypatch.setattr(convert, "_LEAST_KEPT_BYTES", 1)
    tensors = small_model.tensors(3, 32)
    small_model.write(tmp_path / "source", tensors)
    return tensors


def job(path, target="steps/0", **options):
    return convert.Job(
        source=str(path / "source"),
        target=str(path / target),
        rules=str(path / "layout.yml"),
        **options,
    )


def flat(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def restored(path):
    """The state of the step 0, as plain Orbax restores it."""
    return ocp.load_checkpointables(path / "steps" / "0")["state"]


def checkpointer_of(path):
    return ec.Checkpointer([ec.Persistent(path / "steps", every=1)])


def test_an_orbax_step_is_read_by_all_that_read_steps_and_comes_back(
    source, tmp_path, capsys
):
    done = []
    convert.convert(job(tmp_path), progress=lambda *each: done.append(each))
    expected = bits(small_model.expected(source))
    total = sum(len(values) for _, _, values in expected.values())
    assert done[-1] == (total, total)
    assert bits(flat(restored(tmp_path))) == expected
    with checkpointer_of(tmp_path) as checkpointer:
        assert bits(flat(checkpointer.load())) == expected
    assert main.main(["verify", str(tmp_path / "steps")]) == 0
    assert main.main(["inspect", str(tmp_path / "steps" / "0")]) == 0
    assert "PASSED" in capsys.readouterr().out
    back = job(tmp_path, "back", is_reversed=True, to="safetensors")
    convert.convert(dataclasses.replace(back, source=str(tmp_path / "steps" / "0")))
    assert bits(read(tmp_path / "back")) == bits(source)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("to", TREES)
def test_a_dry_run_writes_nothing(tmp_path, capsys, to):
    before = set(os.listdir(tmp_path))
    arguments = [str(tmp_path / "source"), str(tmp_path / "steps" / "0")]
    rules = ["--rules", str(tmp_path / "layout.yml"), "--to", to]
    given = ["convert", *arguments, *rules, "--dry-run"]
    assert main.main(given) == 0
    assert set(os.listdir(tmp_path)) == before
    shown = capsys.readouterr().out
    assert "safetensors: 10 tensors\nto write: 6 tensors" in shown
    assert "rules[1]: 3 tensors to 1, 49,152 bytes" in shown
    assert "padding: 1 boxes, 128 bytes" in shown
    assert "1 files without a checksum: " in shown
    planned = json.loads(runs.verb(*given, "--json"))
    assert (planned["sources"], planned["targets"]) == (10, 6)
    assert set(os.listdir(tmp_path)) == before
    written = json.loads(runs.verb("convert", *arguments, *rules, "--json"))
    assert written["tensors"] == 6


@pytest.mark.usefixtures("source")
def test_targets_are_not_replaced_and_have_to_be_steps(tmp_path):
    convert.convert(job(tmp_path))
    with pytest.raises(errors.CheckpointError, match="exists already"):
        convert.convert(job(tmp_path))
    with pytest.raises(errors.CheckpointError, match="has steps already"):
        convert.convert(job(tmp_path, "steps/1"))
    with pytest.raises(errors.CheckpointError, match=r"convert to .*model/0"):
        convert.convert(job(tmp_path, "model"))


@pytest.mark.usefixtures("source")
def test_no_step_is_converted_into_the_directory_of_a_live_run(tmp_path):
    with subprocess.Popen(["sleep", "1000"]) as other:
        stat = pathlib.Path("/proc", str(other.pid), "stat").read_text()
        owner = dataclasses.replace(
            process.this(), pid=other.pid, start_ticks=int(stat.split()[21])
        )
        writer = claims.Writer(
            tmp_path / "steps", claimant=claims.Claimant(owner=owner)
        )
        writer.begin()
        try:
            with pytest.raises(errors.RunError, match="steps is being written by"):
                convert.convert(job(tmp_path))
        finally:
            other.kill()


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("to", TREES)
def test_only_one_conversion_to_a_target_runs_at_a_time(tmp_path, to):
    refused = []

    def convert_again(*_):
        with pytest.raises(errors.RunError, match="is being written by") as caught:
            convert.convert(job(tmp_path, to=to))
        refused.append(str(caught.value))

    convert.convert(job(tmp_path, to=to), progress=convert_again)
    assert {each.partition(" ")[0] for each in refused} == {str(tmp_path / "steps/0")}
    assert to == "orbax" or os.listdir(tmp_path / "steps") == ["0"]


class Stop(BaseException):
    """Stands for the end of a process: no code catches it."""


def stop(done, total):
    """Ends a conversion when half of it was written."""
    if 2 * done > total:
        raise Stop


def end_before_change(number, given, made, check):
    """Converts, ends before a change of a file, and converts again."""
    lock, left = threading.Lock(), number

    def watch(change, path):
        nonlocal left
        # The lock of the directory is that of this process, which lives.
        if change != "make" and "worlds" not in path:
            with lock:
                if not left:
                    raise Stop
                left -= 1

    try:
        with seams.watched(watch):
            convert.convert(given)
    except Stop:
        # What is visible is whole.
        if not made.exists():
            convert.convert(given)
        check()
        return True
    return False


@pytest.mark.parametrize("to", TREES)
@pytest.mark.parametrize(
    "numbers", [[0, 3, 9], pytest.param(range(1000), marks=pytest.mark.night)]
)
def test_a_conversion_that_ends_before_a_change_of_a_file_can_be_repeated(
    source, tmp_path, numbers, to
):
    made, expected = tmp_path / "steps" / "0", bits(small_model.expected(source))

    def check():
        held = flat(restored(tmp_path)) if to == "orbax" else read(made)
        assert bits(held) == expected
        shutil.rmtree(tmp_path / "steps")

    number = 0
    for number in numbers:
        if not end_before_change(number, job(tmp_path, to=to), made, check):
            break
    assert number > 3


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("to", TREES)
def test_storage_that_fails_is_one_error_and_nothing_is_visible(tmp_path, to):
    def refuse(change, path):
        if change in ("create", "write") and "worlds" not in path:
            raise OSError(28, "No space left on device")

    full = pytest.raises(errors.CheckpointError, match="No space left on device")
    with full, seams.watched(refuse):
        convert.convert(job(tmp_path, to=to))
    assert not (tmp_path / "steps" / "0").exists()
    convert.convert(job(tmp_path, to=to))


@pytest.mark.parametrize(
    "bucket",
    [
        pytest.param("gs", marks=pytest.mark.slow),
        pytest.param("s3", marks=pytest.mark.night),
    ],
    indirect=True,
)
def test_a_step_in_a_bucket_is_repeated_and_comes_back(source, tmp_path, bucket):
    given = dataclasses.replace(job(tmp_path), target=f"{bucket}/steps/0")
    with pytest.raises(Stop):
        convert.convert(given, progress=stop)
    convert.convert(given)
    assert main.main(["verify", f"{bucket}/steps"]) == 0
    with pytest.raises(errors.CheckpointError, match="exists already"):
        convert.convert(given)
    back = dataclasses.replace(
        given,
        source=given.target,
        target=str(tmp_path / "back"),
        is_reversed=True,
        to="safetensors",
    )
    convert.convert(back)
    assert bits(read(tmp_path / "back")) == bits(source)


LAYOUT = """
version: 1
rules:
  - from: {"w": "(kv d) embed"}
    to: {"params/w": "embed kv d"}
"""


def converted(*arguments):
    return main.main(["convert", *map(str, arguments)])


def test_a_layout_that_ships_takes_its_sizes_from_the_command(tmp_path, capsys):
    tensors = small_models.tensors("llama3")
    small_model.write(tmp_path / "source", tensors)
    given = [tmp_path / "source", tmp_path / "steps" / "0", "--dry-run"]
    rules = ["--rules", "hf_llama_to_maxtext"]
    assert converted(*given, *rules) == 1
    assert "size" in capsys.readouterr().err
    assert converted(*given, *rules, "--size", "d=14") == 1
    assert "--size interleave=" in capsys.readouterr().err
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
    assert bits(read(tmp_path / "made")) == bits({"params/w": w, **leaves})
    given = [tmp_path / "source", tmp_path / "three", *to, *rules]
    assert converted(*given, "--size", "kv=3") == 0
    w = values.reshape(3, 2, 4).transpose(2, 0, 1).copy()
    assert bits(read(tmp_path / "three")) == bits({"params/w": w, **leaves})
    (tmp_path / "source" / "config.json").unlink()
    capsys.readouterr()
    given[1] = tmp_path / "none"
    assert converted(*given) == 1
    assert "layout.yml: sizes['kv']: the checkpoint has no value config/kv" in (
        capsys.readouterr().err
    )
    assert converted(*given, "--size", "kv=3") == 1
    assert "layout.yml: fill['step']: the checkpoint has no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "there", "back"),
    [
        ("tree: items", "items", "state"),
        ("tree: b-2\ntree_inverse: a", "b-2", "a"),
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
    with pytest.raises(LayoutError, match="layout: tree: "):
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
    assert bits(read(tmp_path / "back")) == bits(tensors)
    small_model.write(tmp_path / "wrong", {"other/x": np.ones(3, np.float32)})
    assert converted(tmp_path / "wrong", tmp_path / "other" / "0", *rules) == 1
    assert "other is listed in `lists`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "options", "match"),
    [
        (("a", "a/b"), [], "a is a target, and so are parts"),
        (("a/b", "a.b"), [], "one of them"),
        (("w",), ["--size", "kv=2"], "give --rules"),
        (("w",), ["--reverse"], "give --rules"),
        (("w",), ["--rules", "llama"], "hf_llama_to_maxtext"),
    ],
)
def test_what_cannot_be_converted_is_one_error(tmp_path, capsys, names, options, match):
    ones = dict.fromkeys(names, np.ones(3, np.float32))
    small_model.write(tmp_path / "source", ones)
    given = [tmp_path / "source", tmp_path / "steps" / "0", *options]
    assert converted(*given) == 1
    assert match in capsys.readouterr().err
    assert not (tmp_path / "steps").exists()


_CONVERT = """
import json, sys
from elastic_ckpt.universal.writing import convert
from elastic_ckpt.universal.writing.convert import Job
convert.convert(Job(source=sys.argv[1], target=sys.argv[2], to="safetensors"))
print(json.dumps(sorted(sys.modules)))
"""


def test_raw_formats_are_converted_without_jax_orbax_and_tensorstore(tmp_path):
    small_model.write(tmp_path / "source", {"w": np.ones(3, np.float32)})
    paths = [str(tmp_path / "source"), str(tmp_path / "made")]
    imported = json.loads(
        subprocess.check_output([sys.executable, "-c", _CONVERT, *paths])
    )
    assert not {"jax", "orbax", "tensorstore", "fsspec"}.intersection(imported)
    assert "numpy" in imported
