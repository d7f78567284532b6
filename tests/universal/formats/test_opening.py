"""Checkpoints in buckets open as those on this machine do; what is none is refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from orbax.checkpoint import v1

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import megatron
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import stored_values
from tests.universal.formats.stored_values import DATA

# s3 is for CI.
BUCKETS = pytest.mark.parametrize(
    "bucket", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True
)


@BUCKETS
def test_a_checkpoint_of_pytorch_opens_alike_in_a_bucket(bucket):
    for file in (DATA / "dcp").iterdir():
        epath.Path(f"{bucket}/dcp/{file.name}").write_bytes(file.read_bytes())
    local = opening.open_checkpoint(DATA / "dcp")
    remote = opening.open_checkpoint(f"{bucket}/dcp")
    assert repr(remote.tensors).replace(bucket, str(DATA)) == repr(local.tensors)
    assert dict(remote.values) == dict(local.values)
    files = [fragment.file for fragment in remote.tensors[0].fragments]
    assert remote.check(files) == []


@BUCKETS
def test_an_orbax_checkpoint_opens_in_a_bucket(bucket, tmp_path):
    # Orbax itself writes to gs:// alone.
    w = jnp.arange(6.0).reshape(2, 3)
    v1.save(tmp_path / "x", {"w": w})
    for file in (tmp_path / "x").rglob("*"):
        if file.is_file():
            copy = epath.Path(f"{bucket}/{file.relative_to(tmp_path)}")
            copy.write_bytes(file.read_bytes())
    stored_values.assert_holds(f"{bucket}/x", {"w": np.asarray(w)})


@pytest.mark.parametrize(
    "path",
    [
        "dcp/.metadata",
        "weights/single/pytorch_model.bin",
        "weights/sharded/pytorch_model.bin.index.json",
    ],
)
def test_a_file_that_leads_to_others_opens_as_their_directory(path):
    of_file = opening.open_checkpoint(DATA / path)
    of_directory = opening.open_checkpoint((DATA / path).parent)
    assert of_file.tensors == of_directory.tensors
    assert dict(of_file.values) == dict(of_directory.values)


@pytest.mark.parametrize("pointer", ["latest", megatron.LATEST])
@pytest.mark.parametrize("text", ["", "3", "../x", "/x", "absent", "release"])
def test_a_file_that_names_the_latest_leads_to_what_is_beside_it(
    tmp_path, pointer, text
):
    (tmp_path / pointer).write_text(text)
    with pytest.raises(FormatError, match=pointer):
        opening.open_checkpoint(tmp_path)


def test_a_path_of_no_format_is_refused_with_the_formats_that_are_read(tmp_path):
    with pytest.raises(FormatError, match="does not exist"):
        opening.open_checkpoint(tmp_path / "missing")
    (tmp_path / "model.h5").write_text("x")
    with pytest.raises(FormatError, match=r"has model\.h5; looked for were .*safetens"):
        opening.open_checkpoint(tmp_path)
