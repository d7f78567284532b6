"""Conversions of any tensors to safetensors."""

import json
import math
import os
import pathlib
import tempfile
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import safetensors
from elastic_ckpt.universal.writing import convert
from elastic_ckpt.universal.writing.safetensors_files import SafetensorsFiles
from tests.universal import safetensors_files
from tests.universal.safetensors_files import bits, read

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


INDEX = "model.safetensors.index.json"


def job(path, target="model", **options):
    return convert.Job(
        source=str(path / "source.safetensors"),
        target=str(path / target),
        to="safetensors",
        **options,
    )


@hypothesis.given(
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
        convert.convert(job(path))
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
        ('"__metadata__": "a"', "cannot have this name"),
        (r'"\ud800": "a"', "cannot have this name"),
        ('"w": {dims: "a", dtype: uint4}', "uint4|cannot|no dtype"),
    ],
)
def test_tensors_that_cannot_be_written_are_one_error(tmp_path, target, problem):
    w = np.zeros(3, np.float32)
    safetensors_files.write(tmp_path / "source.safetensors", {"w": w})
    layout = tmp_path / "layout.yml"
    layout.write_text(f"version: 1\nrules: [{{from: {{w: a}}, to: {{{target}}}}}]")
    with pytest.raises(errors.ElasticCkptError, match=problem):
        convert.convert(job(tmp_path, rules=str(layout)))
    assert set(os.listdir(tmp_path)) == {"source.safetensors", "layout.yml"}
