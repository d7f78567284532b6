"""What a path leads to: files, directories, buckets, and the cache of Hugging Face."""

import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from orbax.checkpoint import v1

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import files, megatron
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import stored_values
from tests.universal.formats.stored_values import DATA


# s3 is for CI.
@pytest.mark.parametrize(
    "bucket", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True
)
def test_a_checkpoint_opens_alike_in_a_bucket(bucket, tmp_path):
    # Orbax itself writes to gs:// alone.
    w = jnp.arange(6.0).reshape(2, 3)
    v1.save(tmp_path / "x", {"w": w})
    for file in (*(DATA / "dcp").iterdir(), *(tmp_path / "x").rglob("*")):
        if file.is_file():
            place = file.relative_to(DATA if DATA in file.parents else tmp_path)
            epath.Path(f"{bucket}/{place}").write_bytes(file.read_bytes())
    stored_values.assert_holds(f"{bucket}/x", {"w": np.asarray(w)})
    local = opening.open_checkpoint(DATA / "dcp")
    remote = opening.open_checkpoint(f"{bucket}/dcp")
    assert repr(remote.tensors).replace(bucket, str(DATA)) == repr(local.tensors)
    assert dict(remote.values) == dict(local.values)
    assert not stored_values.without_checksums(remote)


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
    found = r"contains model\.h5; expected one of .*safetens"
    with pytest.raises(FormatError, match=found):
        opening.open_checkpoint(tmp_path)


COMMIT, OLDER = "0123456789abcdef" * 2 + "01234567", "f" * 40
INVALID = "is not a model ID"


@pytest.fixture
def environ(monkeypatch):
    """The environment, without the variables that lead to the cache."""
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture
def cache(tmp_path, environ):
    """A cache as `huggingface_hub` fills it: snapshots are links to blobs."""
    folder = tmp_path / "hub" / "models--org--tiny-1.0"
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs" / "refs" / "pr").mkdir(parents=True)
    for commit in (COMMIT, OLDER):
        (folder / "snapshots" / commit).mkdir(parents=True)
    for file in (DATA / "weights" / "single").iterdir():
        shutil.copy(file, folder / "blobs")
        link = folder / "snapshots" / COMMIT / file.name
        link.symlink_to(f"../../blobs/{file.name}")
    shutil.copy(DATA / "weights" / "no_crc.pt", folder / "snapshots" / OLDER)
    for name, commit in {"main": COMMIT, "v1": OLDER, "refs/pr/1": OLDER}.items():
        (folder / "refs" / name).write_text(commit)
    environ.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("revision", "commit"),
    [("", COMMIT), ("@v1", OLDER), ("@refs/pr/1", OLDER), (f"@{OLDER}", OLDER)],
)
def test_a_model_of_the_cache_opens_by_its_id_and_revision(cache, revision, commit):
    path = f"hf://org/tiny-1.0{revision}"
    found = cache / "models--org--tiny-1.0" / "snapshots" / commit
    assert files.resolved(path) == found
    checkpoint = opening.open_checkpoint(path)
    assert (checkpoint.format, len(checkpoint.tensors)) == ("PyTorch", 4)
    assert checkpoint.values.get("config/hidden_size") == (4 if not revision else None)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HF_HOME": "/h"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, f"{pathlib.Path.home()}/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hub_has_it(environ, variables, folder):
    for name, value in variables.items():
        environ.setenv(name, value)
    with pytest.raises(FormatError, match=rf"\({folder}/models--org--name\)"):
        files.resolved("hf://org/name")


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("hf://org/other", "run `hf download org/other`, or set HF_HOME"),
        ("hf://org/tiny-1.0@v2", "run `hf download org/tiny-1.0 --revision v2`"),
        (f"hf://org/tiny-1.0@{'0' * 40}", "is not in the hub's cache"),
        ("hf://", INVALID),
        ("hf://../x", INVALID),
        ("hf://a/b/c", INVALID),
        ("hf://org/name@", INVALID),
        ("hf://o/..", INVALID),
        ("hf://org/name@x/../../y", INVALID),
    ],
)
def test_what_the_cache_does_not_have_is_one_error(path, match):
    with pytest.raises(FormatError, match=match):
        opening.open_checkpoint(path)
