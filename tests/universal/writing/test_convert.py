"""Checkpoints are converted to other layouts and formats, also after a kill."""

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
from etils import epath
from flax import traverse_util
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.cli import main
from elastic_ckpt.core import errors, process, storage
from elastic_ckpt.tiers.persistent import claims
from elastic_ckpt.universal.formats import safetensors
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.writing import convert
from elastic_ckpt.universal.writing.safetensors_files import SafetensorsFiles
from tests import runs, seams
from tests.maxtext import small_models
from tests.universal import safetensors_files
from tests.universal.rules.relayout import relayout
from tests.universal.safetensors_files import bits, read

INDEX = "model.safetensors.index.json"
TREES = ("orbax", "safetensors")
W = np.arange(24, dtype=np.float32).reshape(6, 4)
MODEL = """
version: 1
sizes: {kv: 2, q: 4, k: 1, v: 1, d: 8}
rules:
  - from: {"layers.{layer}.qkv.weight": "(kv (q + k + v) d) embed"}
    to:
      "params/layers/query": "embed layer (kv q) d"
      "params/layers/key": "embed layer (kv k) d"
      "params/layers/value": "embed layer (kv v) d"
  - from: {"layers.{layer}.up.weight": "out embed"}
    to: {"params/layers/up": "layer embed out"}
  - from: {"layers.{layer}.norm.weight": "embed"}
    to: {"params/layers/norm": "layer embed"}
  - from: {"embedding.weight": "vocab embed"}
    to: {"params/embedding": "(vocab + pad) embed"}
    pad: {pad: 0}
    sizes: {pad: 1}
"""


def write(directory, given):
    """Writes a model of one file."""
    directory.mkdir()
    safetensors_files.write(directory / "model.safetensors", given)


def converted(*arguments):
    """The exit status of the command."""
    return main.main(["convert", *map(str, arguments)])


def refusal(capsys, *arguments):
    """What the command writes when it fails."""
    capsys.readouterr()
    assert converted(*arguments) == 1
    return capsys.readouterr().err


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A model whose targets have several chunks each."""
    monkeypatch.setattr(convert, "CHUNK_BYTES", 2**12)
    monkeypatch.setattr(convert, "_BUDGET_BYTES", 2**14)
    monkeypatch.setattr(convert, "_LEAST_KEPT_BYTES", 1)
    shapes = {"embedding.weight": (103, 32)}
    for layer in range(3):
        of_layer = {"qkv": (96, 32), "up": (128, 32), "norm": (32,)}
        shapes |= {f"layers.{layer}.{name}.weight": of_layer[name] for name in of_layer}
    numbers = np.random.default_rng(0)
    tensors = {
        name: numbers.random(shape, np.float32) for name, shape in shapes.items()
    }
    write(tmp_path / "source", tensors)
    (tmp_path / "layout.yml").write_text(MODEL)
    return tensors


def job(path, target="steps/0", *, source="source", rules="layout.yml", **options):
    source, target = str(path / source), str(path / target)
    rules = rules and str(path / rules)
    return convert.Job(source=source, target=target, rules=rules, **options)


flat = functools.partial(traverse_util.flatten_dict, sep="/")


def restored(path):
    """The state of the step 0, as plain Orbax restores it."""
    return ocp.load_checkpointables(path / "steps" / "0")["state"]


def test_an_orbax_step_is_read_by_all_that_read_steps_and_comes_back(
    source, tmp_path, capsys
):
    done = []
    convert.convert(job(tmp_path), progress=lambda *each: done.append(each))
    expected = bits(relayout(Layout.parse(MODEL), source))
    total = sum(len(values) for _, _, values in expected.values())
    assert done[-1] == (total, total)
    assert bits(flat(restored(tmp_path))) == expected
    tiers = [ec.Persistent(tmp_path / "steps", every=1)]
    with ec.Checkpointer(tiers) as checkpointer:
        assert bits(flat(checkpointer.load())) == expected
    assert main.main(["verify", str(tmp_path / "steps")]) == 0
    assert main.main(["inspect", str(tmp_path / "steps" / "0")]) == 0
    assert "PASSED" in capsys.readouterr().out
    there = {"source": "steps/0", "is_reversed": True, "to": "safetensors"}
    convert.convert(job(tmp_path, "back", **there))
    assert bits(read(tmp_path / "back")) == bits(source)


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize("to", TREES)
def test_a_dry_run_writes_nothing(tmp_path, capsys, to):
    before = set(os.listdir(tmp_path))
    given = ["convert", str(tmp_path / "source"), str(tmp_path / "steps" / "0")]
    given += ["--rules", str(tmp_path / "layout.yml"), "--to", to]
    assert main.main([*given, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "safetensors: 10 tensors\nto write: 6 tensors" in shown
    assert "rules[1]: 3 tensors to 1, 49,152 bytes" in shown
    assert "padding: 1 boxes, 128 bytes" in shown
    assert "1 files without a checksum: " in shown
    planned = json.loads(runs.verb(*given, "--dry-run", "--json"))
    assert (planned["sources"], planned["targets"]) == (10, 6)
    assert set(os.listdir(tmp_path)) == before
    assert json.loads(runs.verb(*given, "--json"))["tensors"] == 6


@pytest.mark.usefixtures("source")
def test_targets_are_not_replaced_and_have_to_be_steps(tmp_path):
    convert.convert(job(tmp_path))
    with pytest.raises(errors.CheckpointError, match="already exists"):
        convert.convert(job(tmp_path))
    with pytest.raises(errors.CheckpointError, match="already has steps"):
        convert.convert(job(tmp_path, "steps/1"))
    with pytest.raises(errors.CheckpointError, match=r"convert to .*model/0"):
        convert.convert(job(tmp_path, "model"))


@pytest.mark.usefixtures("source")
def test_no_step_is_converted_into_the_directory_of_a_live_run(tmp_path):
    # Of the first process of the machine, which lives.
    stat = pathlib.Path("/proc/1/stat").read_text().rpartition(")")[2].split()
    owner = dataclasses.replace(process.this(), pid=1, start_ticks=int(stat[19]))
    claimant = claims.Claimant(owner=owner)
    write_claim = claims.WriteClaim(tmp_path / "steps", claimant=claimant)
    write_claim.begin()
    with pytest.raises(errors.RunError, match="steps is being written by"):
        convert.convert(job(tmp_path))


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


def end_before(number):
    """Ends a process before a change of a file."""
    changes = itertools.count()

    def watch(change, path):
        # The lock of the directory is that of this process, which lives.
        if change != "make" and "worlds" not in path and next(changes) >= number:
            raise Stop

    return watch


@pytest.mark.parametrize("to", TREES)
@pytest.mark.parametrize(
    "numbers", [[0, 3, 9], pytest.param(range(1000), marks=pytest.mark.night)]
)
def test_a_conversion_that_ends_before_a_change_of_a_file_can_be_repeated(
    source, tmp_path, numbers, to
):
    made, expected = (
        tmp_path / "steps" / "0",
        bits(relayout(Layout.parse(MODEL), source)),
    )
    for number in numbers:
        try:
            with seams.watched(end_before(number)):
                convert.convert(job(tmp_path, to=to))
            break
        except Stop:
            # What is visible is whole.
            if not made.exists():
                convert.convert(job(tmp_path, to=to))
        held = flat(restored(tmp_path)) if to == "orbax" else read(made)
        assert bits(held) == expected
        shutil.rmtree(tmp_path / "steps")
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
    ("bucket", "to"),
    [
        ("gs", "safetensors"),
        pytest.param("gs", "orbax", marks=pytest.mark.slow),
        pytest.param("s3", "safetensors", marks=pytest.mark.night),
        pytest.param("s3", "orbax", marks=pytest.mark.night),
    ],
    indirect=["bucket"],
)
def test_a_checkpoint_in_a_bucket_exists_when_it_is_committed(
    source, tmp_path, monkeypatch, bucket, to
):
    path = epath.Path(bucket) / "steps" / "0"
    given = dataclasses.replace(job(tmp_path, to=to), target=str(path))
    if to == "safetensors":
        storage.write_atomic(path / "of-others", b"x")
        with pytest.raises(errors.CheckpointError, match="already exists"):
            convert.convert(given)
        assert storage.names(path) == ["of-others"]
        storage.remove(path)
    monkeypatch.setattr(SafetensorsFiles, "most_file_bytes", 7000)
    with pytest.raises(Stop), seams.watched(end_before(6)):
        convert.convert(given)
    assert storage.names(path)
    assert INDEX not in storage.names(path)
    # Files that the second conversion does not write are gone.
    monkeypatch.setattr(SafetensorsFiles, "most_file_bytes", 14000)
    convert.convert(given)
    if to == "orbax":
        assert main.main(["verify", f"{bucket}/steps"]) == 0
    else:
        files = json.loads((path / INDEX).read_bytes())["weight_map"].values()
        assert {*storage.names(path)} == {INDEX, *files}
        assert storage.names(path.parent) == ["0"]
    with pytest.raises(errors.CheckpointError, match="already exists"):
        convert.convert(given)
    back = job(tmp_path, "back", is_reversed=True, to="safetensors")
    convert.convert(dataclasses.replace(back, source=str(path)))
    assert bits(read(tmp_path / "back")) == bits(source)


LAYOUT = """
version: 1
rules:
  - from: {"w": "(kv d) embed"}
    to: {"params/w": "embed kv d"}
"""


def test_a_layout_that_ships_takes_its_sizes_from_the_command(tmp_path, capsys):
    tensors = small_models.tensors("llama3")
    write(tmp_path / "source", tensors)
    given = [tmp_path / "source", tmp_path / "steps" / "0", "--dry-run"]
    given += ["--rules", "hf_llama_to_maxtext"]
    assert "size" in refusal(capsys, *given)
    given += ["--size", "d=14"]
    assert "--size interleave=" in refusal(capsys, *given)
    assert converted(*given, "--size", "interleave=2") == 0
    assert f"safetensors: {len(tensors)} tensors" in capsys.readouterr().out


def test_sizes_and_leaves_are_values_of_the_checkpoint_unless_given(tmp_path, capsys):
    write(tmp_path / "source", {"w": W})
    (tmp_path / "source" / "config.json").write_text('{"kv": 2, "steps": 7}')
    (tmp_path / "layout.yml").write_text(
        LAYOUT.replace("rules:", "sizes: {kv: {value: config/kv}}\nrules:")
        + "fill: {step: {value: config/steps}, scale: 0.5}\n"
    )

    def given(target, *options):
        options = ["--rules", tmp_path / "layout.yml", *options]
        return [tmp_path / "source", tmp_path / target, "--to", "safetensors", *options]

    leaves = {"step": np.array(7, np.int32), "scale": np.array(0.5, np.float32)}
    for kv, options in ((2, []), (3, ["--size", "kv=3"])):
        assert converted(*given(f"of {kv}", *options)) == 0
        w = W.reshape(kv, -1, 4).transpose(2, 0, 1)
        assert bits(read(tmp_path / f"of {kv}")) == bits({"params/w": w, **leaves})
    (tmp_path / "source" / "config.json").unlink()
    problem = "layout.yml: sizes['kv']: the checkpoint has no value at config/kv"
    assert problem in refusal(capsys, *given("none"))
    problem = "layout.yml: fill['step']: the checkpoint has no"
    assert problem in refusal(capsys, *given("none", "--size", "kv=3"))


LISTS = """
version: 1
rules:
  - from: {"{name:path}": "..."}
    to: {"{name:path}": "..."}
lists: [opt, opt/2/inner, other]
tree: b-2
tree_inverse: a
"""


def test_trees_of_orbax_have_the_name_and_the_lists_of_the_layout(tmp_path, capsys):
    tensors = {
        name: np.full([3] * number, number, np.float32)
        for number, name in enumerate(["opt/0/mu", "opt/2/inner/1", "dict/0"])
    }
    write(tmp_path / "source", tensors)
    (tmp_path / "lists.yml").write_text(LISTS)
    steps, rules = tmp_path / "steps" / "0", ["--rules", tmp_path / "lists.yml"]
    assert converted(tmp_path / "source", steps, *rules) == 0
    tree = ocp.load(steps, checkpointable_name="b-2")
    lists = [{"mu": 0}, None, {"inner": [None, 1]}]
    shape = jax.tree.map(lambda each: int(each.max()), tree)
    assert shape == {"opt": lists, "dict": {"0": 2}}
    assert converted(steps, tmp_path / "back" / "0", *rules, "--reverse") == 0
    tree = ocp.load(tmp_path / "back" / "0", checkpointable_name="a")
    np.testing.assert_array_equal(tree["dict"]["0"], tensors["dict/0"])
    assert converted(steps, tmp_path / "all", "--to", "safetensors") == 0
    assert bits(read(tmp_path / "all")) == bits(tensors)
    write(tmp_path / "wrong", {"other/x": np.ones(3, np.float32)})
    given = [tmp_path / "wrong", tmp_path / "other" / "0", *rules]
    assert "other is in the layout's `lists`" in refusal(capsys, *given)


@pytest.mark.parametrize(
    ("names", "options", "match"),
    [
        (("a", "a/b"), [], "a is both a tensor and the parent of other tensors"),
        (("a/b", "a.b"), [], "one would be lost"),
        (("w",), ["--size", "kv=2"], "specify --rules"),
        (("w",), ["--reverse"], "specify --rules"),
        (("w",), ["--rules", "llama"], "hf_llama_to_maxtext"),
    ],
)
def test_what_cannot_be_converted_is_one_error(tmp_path, capsys, names, options, match):
    ones = dict.fromkeys(names, np.ones(3, np.float32))
    write(tmp_path / "source", ones)
    given = [tmp_path / "source", tmp_path / "steps" / "0", *options]
    assert match in refusal(capsys, *given)
    assert not (tmp_path / "steps").exists()


_CONVERT = """
import sys
from elastic_ckpt.universal.writing.convert import Job, convert
convert(Job(source=sys.argv[1], target=sys.argv[2], to="safetensors"))
print(*sys.modules)
"""


def test_raw_formats_are_converted_without_jax_orbax_and_tensorstore(tmp_path):
    write(tmp_path / "source", {"w": np.ones(3, np.float32)})
    paths = [tmp_path / "source", tmp_path / "made"]
    imported = subprocess.check_output([sys.executable, "-c", _CONVERT, *paths])
    names = set(imported.decode().split())
    assert not {"jax", "orbax", "tensorstore", "fsspec"} & names
    assert "numpy" in names


# Models that `from_pretrained` of Hugging Face loads, from any source and from runs.

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def model(path, tensors, **config):
    write(path, tensors)
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
        ({EMBEDDING: W}, False, [], "the output layer would be random"),
        ({"w": W}, False, ["--dtype", "bf16"], "use bfloat16"),
        (FP8, False, ["--dtype", "bfloat16"], "w is float8_e4m3fn"),
    ],
)
def test_what_is_no_model_is_refused(
    tmp_path, capsys, tensors, is_tied, options, problem
):
    model(tmp_path / "source", tensors, tie_word_embeddings=is_tied)
    assert problem in refusal(capsys, *exported(tmp_path, *options))
    assert not (tmp_path / "made").exists()


STATES = """
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
    (tmp_path / "rules.yml").write_text(STATES)
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


# Any tensors.

FILE = {"source": "source.safetensors", "to": "safetensors"}
NAMES = ["float32", "float64", "int64", "uint8", "bool", "bfloat16", "float8_e4m3fn"]


@st.composite
def arrays(draw):
    """An array of any bits."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    dtype = np.dtype(draw(st.sampled_from(NAMES)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    content = generator.bytes(math.prod(shape) * dtype.itemsize)
    if dtype.kind == "b":
        content = bytes(byte % 2 for byte in content)
    return np.frombuffer(content, dtype).reshape(shape)


@given(
    st.dictionaries(st.text(min_size=1, max_size=8), arrays(), min_size=1, max_size=6),
    st.integers(0, 300),
    st.sampled_from([1, 16, 2**24]),
    st.sampled_from([1, 100, 2**28]),
)
def test_tensors_come_back_with_their_bits_however_they_are_cut(
    tensors, most_file_bytes, chunk_bytes, batch_bytes
):
    with (
        tempfile.TemporaryDirectory() as parent,
        mock.patch.object(SafetensorsFiles, "most_file_bytes", most_file_bytes),
        mock.patch.object(convert, "_BUDGET_BYTES", 2 * batch_bytes),
        mock.patch.object(convert, "CHUNK_BYTES", chunk_bytes),
    ):
        path = pathlib.Path(parent)
        safetensors_files.write(path / "source.safetensors", tensors)
        convert.convert(job(path, "model", rules=None, **FILE))
        directory = path / "model"
        assert bits(read(directory)) == bits(tensors)
        assert set(os.listdir(parent)) == {"model", "source.safetensors"}
        names = set(os.listdir(directory))
        if names == {"model.safetensors"}:
            return
        index = json.loads((directory / INDEX).read_bytes())
        assert index["weight_map"].keys() == tensors.keys()
        size = sum(array.nbytes for array in tensors.values())
        assert index["metadata"]["total_size"] == size
        assert names == {INDEX, *index["weight_map"].values()}
        for name in names - {INDEX}:
            held, _ = safetensors.read_header(directory / name)
            sizes = [tensors[t.name].nbytes for t in held]
            # A larger tensor is alone.
            assert len(sizes) == 1 or sum(sizes) <= most_file_bytes
            places = [(t, part) for t in held for part in t.fragments]
            assert all(part.offset % t.dtype.itemsize == 0 for t, part in places)


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ('"__metadata__": "a"', "safetensors cannot store"),
        (r'"\ud800": "a"', "safetensors cannot store"),
        ('"w": {dims: "a", dtype: uint4}', "uint4|cannot|no dtype"),
    ],
)
def test_tensors_that_cannot_be_written_are_one_error(tmp_path, target, problem):
    w = np.zeros(3, np.float32)
    safetensors_files.write(tmp_path / "source.safetensors", {"w": w})
    rules = f"version: 1\nrules: [{{from: {{w: a}}, to: {{{target}}}}}]"
    (tmp_path / "layout.yml").write_text(rules)
    with pytest.raises(errors.ElasticCkptError, match=problem):
        convert.convert(job(tmp_path, **FILE))
    assert set(os.listdir(tmp_path)) == {"source.safetensors", "layout.yml"}
