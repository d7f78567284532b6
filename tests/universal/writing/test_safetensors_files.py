"""Conversions to safetensors, of any tensors, after damage, and in buckets."""

import dataclasses
import json
import math
import os
import pathlib
import tempfile
from unittest import mock

import hypothesis
import numpy as np
import pytest
from etils import epath
from hypothesis import strategies as st

from elastic_ckpt.core import errors, storage
from elastic_ckpt.universal.formats import safetensors, weights
from elastic_ckpt.universal.writing import convert
from elastic_ckpt.universal.writing.safetensors_files import SafetensorsFiles
from tests.universal import safetensors_files
from tests.universal.safetensors_files import bits, read
from tests.universal.writing.test_convert import Stop, stop

NAMES = ["float32", "float64", "int64", "uint8", "bool", "bfloat16", "float8_e4m3fn"]


@st.composite
def random_tensors(draw, most=6):
    """Tensors by name, of all bit patterns."""
    names = draw(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=most))
    made = {}
    for name in dict.fromkeys(names):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
        dtype = np.dtype(draw(st.sampled_from(NAMES)))
        generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        content = generator.bytes(int(np.prod(shape)) * dtype.itemsize)
        if dtype.kind == "b":
            content = bytes(byte % 2 for byte in content)
        made[name] = np.frombuffer(content, dtype).reshape(shape)
    return made


INDEX = "model.safetensors.index.json"


def job(path, target="model", **options):
    return convert.Job(
        source=str(path / "source.safetensors"),
        target=str(path / target),
        to="safetensors",
        **options,
    )


def model(num_tensors=8, size=40):
    generator = np.random.default_rng(num_tensors)
    return {
        f"layers.{n}.weight": generator.random((size, size), np.float32)
        for n in range(num_tensors)
    }


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A model whose tensors are in a file each."""
    monkeypatch.setattr(SafetensorsFiles, "most_file_bytes", 7000)
    monkeypatch.setattr(convert, "CHUNK_BYTES", 2**12)
    tensors = model()
    safetensors_files.write(tmp_path / "source.safetensors", tensors)
    return tensors


@hypothesis.given(
    random_tensors(),
    st.integers(0, 300),
    st.sampled_from([1, 16, 2**24]),
    st.sampled_from([1, 100, 2**28]),
)
def test_tensors_come_back_with_their_bits_however_they_are_cut(
    arrays, most_file_bytes, chunk_bytes, batch_bytes
):
    with (
        tempfile.TemporaryDirectory() as parent,
        mock.patch.object(SafetensorsFiles, "most_file_bytes", most_file_bytes),
        mock.patch.object(convert, "_BUDGET_BYTES", 2 * batch_bytes),
        mock.patch.object(convert, "CHUNK_BYTES", chunk_bytes),
    ):
        path = pathlib.Path(parent)
        safetensors_files.write(path / "source.safetensors", arrays)
        convert.convert(job(path))
        directory = path / "model"
        assert bits(read(directory)) == bits(arrays)
        assert set(os.listdir(parent)) == {"model", "source.safetensors"}
        checkpoint = weights.SAFETENSORS.open_checkpoint(directory)
        assert {tensor.name for tensor in checkpoint.tensors} == arrays.keys()
        names = set(os.listdir(directory))
        if names == {"model.safetensors"}:
            return
        index = json.loads((directory / INDEX).read_bytes())
        assert index["weight_map"].keys() == arrays.keys()
        size = sum(array.nbytes for array in arrays.values())
        assert index["metadata"]["total_size"] == size
        assert names == {INDEX, *index["weight_map"].values()}
        for name in names - {INDEX}:
            tensors, _ = safetensors.read_header(directory / name)
            sizes = [math.prod(t.shape) * t.dtype.itemsize for t in tensors]
            # A larger tensor is alone.
            assert len(sizes) == 1 or sum(sizes) <= most_file_bytes
            places = [(t, part) for t in tensors for part in t.fragments]
            assert all(part.offset % t.dtype.itemsize == 0 for t, part in places)


def test_tensors_that_cannot_be_written_are_one_error(tmp_path):
    safetensors_files.write(tmp_path / "source.safetensors", model(1))
    rules = 'version: 1\nrules:\n  - from: {"layers.0.weight": "a b"}\n    to: {"%s"}\n'
    layout = tmp_path / "layout.yml"
    given = job(tmp_path, rules=str(layout))
    for name in ("__metadata__", r"\ud800"):
        layout.write_text(rules.replace('"%s"', f'"{name}": "a b"'))
        with pytest.raises(errors.CheckpointError, match="cannot have this name"):
            convert.convert(given)
    layout.write_text(rules.replace('"%s"', '"w": {dims: "a b", dtype: uint4}'))
    with pytest.raises(errors.ElasticCkptError, match=r"uint4|cannot|no dtype"):
        convert.convert(given)
    assert set(os.listdir(tmp_path)) == {"source.safetensors", "layout.yml"}


@pytest.mark.parametrize(
    "bucket", ["gs", pytest.param("s3", marks=pytest.mark.night)], indirect=True
)
def test_a_checkpoint_in_a_bucket_exists_when_it_is_committed(
    bucket, source, tmp_path, monkeypatch
):
    url = f"{bucket}/model"
    given = dataclasses.replace(job(tmp_path), target=url)
    storage.write_atomic(epath.Path(url) / "model-00001-of-00009.safetensors", b"x")
    with pytest.raises(errors.CheckpointError, match="exists already"):
        convert.convert(given)
    # Files of others are left alone.
    assert storage.names(url) == ["model-00001-of-00009.safetensors"]
    storage.remove(epath.Path(url))
    with pytest.raises(Stop):
        convert.convert(given, progress=stop)
    left = storage.names(url)
    assert left
    assert INDEX not in left
    monkeypatch.setattr(SafetensorsFiles, "most_file_bytes", 14000)
    convert.convert(given)
    assert len(storage.names(url)) == 5
    assert storage.names(bucket) == ["model"]
    with pytest.raises(errors.CheckpointError, match="exists already"):
        convert.convert(given)
    checkpoint = weights.SAFETENSORS.open_checkpoint(url)
    assert {tensor.name for tensor in checkpoint.tensors} == source.keys()
    convert.convert(dataclasses.replace(job(tmp_path, "back"), source=url))
    assert bits(read(tmp_path / "back")) == bits(source)
