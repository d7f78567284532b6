"""The files of a safetensors checkpoint, planned."""

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.writing import safetensors_plan
from tests.universal.writing import random_tensors


def tensor(name, shape, dtype="float32"):
    return TargetTensor(name=name, dtype=np.dtype(dtype), shape=shape)


def sizes(plan):
    return {
        name: span.stop - span.start
        for file in plan.files
        for name, span in file.spans.items()
    }


@hypothesis.given(random_tensors.tensors(), st.integers(0, 500), st.integers(1, 5))
def test_each_tensor_is_in_one_file_without_gaps_at_a_multiple_of_its_element(
    arrays, most_file_bytes, num_hosts
):
    plan = random_tensors.plan_of(arrays, most_file_bytes=most_file_bytes)
    assert sizes(plan) == {name: array.nbytes for name, array in arrays.items()}
    assert sum(len(file.spans) for file in plan.files) == len(arrays)
    for file in plan.files:
        spans = sorted(file.spans.values(), key=lambda span: (span.start, span.stop))
        ends = [len(file.header), *(span.stop for span in spans)]
        assert ends == [*(span.start for span in spans), file.num_bytes]
        assert all(span.start % span.dtype.itemsize == 0 for span in spans)
        values = file.num_bytes - len(file.header)
        assert len(file.spans) == 1 or values <= most_file_bytes
    dealt = [
        file.name
        for host in range(num_hosts)
        for file in plan.files_of(host, num_hosts=num_hosts)
    ]
    assert sorted(dealt) == [file.name for file in plan.files]


def test_files_and_index_are_named_as_transformers_names_them():
    tensors = [tensor("a", (4,)), tensor("b", (2, 2)), tensor("c", (1,))]
    (single,) = safetensors_plan.plan(tensors).files
    assert single.name == "model.safetensors"
    plan = safetensors_plan.plan(tensors, most_file_bytes=20)
    assert [file.name for file in plan.files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert json.loads(plan.index) == {
        "metadata": {"total_size": 36},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }


def test_hosts_write_about_the_same_number_of_bytes():
    tensors = [tensor(f"w{n}", (100 + n, 100)) for n in range(40)]
    plan = safetensors_plan.plan(tensors, most_file_bytes=100_000)
    loads = [
        sum(file.num_bytes for file in plan.files_of(host, num_hosts=4))
        for host in range(4)
    ]
    assert max(loads) - min(loads) <= max(file.num_bytes for file in plan.files)


def test_a_file_has_at_most_100_000_tensors():
    tensors = [tensor(str(n), (1,)) for n in range(110_000)]
    plan = safetensors_plan.plan(tensors)
    assert [len(file.spans) for file in plan.files] == [100_000, 10_000]


def test_tensors_that_cannot_be_written_are_refused_by_name():
    with pytest.raises(errors.CheckpointError, match="no tensors"):
        safetensors_plan.plan([])
    with pytest.raises(errors.CheckpointError, match=r"same name \(.?twice"):
        safetensors_plan.plan([tensor("twice", ()), tensor("twice", (2,))])
    with pytest.raises(errors.CheckpointError, match="called __metadata__"):
        safetensors_plan.plan([tensor("__metadata__", ())])
    with pytest.raises(FormatError, match="no dtype complex128"):
        safetensors_plan.plan([tensor("a", (), "complex128")])
