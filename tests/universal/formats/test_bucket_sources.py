"""Checkpoints in buckets open as those on this machine do."""

import dataclasses
import pathlib

import jax.numpy as jnp
import pytest
from etils import epath
from orbax.checkpoint import v1

from elastic_ckpt.universal import opening
from tests.universal.formats.fragment_values import values_of

DATA = pathlib.Path(__file__).parent / "data"


@pytest.mark.parametrize("name", ["dcp", "dcp_hf"])
def test_a_checkpoint_of_pytorch_opens_alike_in_a_bucket(bucket, name):
    for file in (DATA / name).iterdir():
        epath.Path(f"{bucket}/{name}/{file.name}").write_bytes(file.read_bytes())
    local = opening.open_checkpoint(DATA / name)
    remote = opening.open_checkpoint(f"{bucket}/{name}")
    assert [on_disk(tensor, bucket) for tensor in remote.tensors] == local.tensors
    assert dict(remote.values) == dict(local.values)
    files = [fragment.file for fragment in remote.tensors[0].fragments]
    assert remote.check(files) == (files if name == "dcp_hf" else [])


def on_disk(tensor, bucket):
    """The tensor with the files that were copied to the bucket."""
    fragments = [
        dataclasses.replace(each, file=each.file.replace(bucket, str(DATA)))
        for each in tensor.fragments
    ]
    return dataclasses.replace(tensor, fragments=tuple(fragments))


def test_an_orbax_checkpoint_opens_in_a_bucket(bucket, tmp_path):
    # Orbax itself writes to gs:// alone.
    v1.save(tmp_path / "x", {"w": jnp.arange(6.0).reshape(2, 3)})
    for file in (tmp_path / "x").rglob("*"):
        if file.is_file():
            copy = epath.Path(f"{bucket}/{file.relative_to(tmp_path)}")
            copy.write_bytes(file.read_bytes())
    (tensor,) = opening.open_checkpoint(f"{bucket}/x").tensors
    assert values_of(tensor).tolist() == [[0, 1, 2], [3, 4, 5]]
