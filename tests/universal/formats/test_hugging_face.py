"""Models of the Hugging Face hub are found in its cache, and never downloaded."""

import pathlib
import shutil

import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import files
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats.stored_values import DATA

COMMIT, OLDER = "0123456789abcdef" * 2 + "01234567", "f" * 40
INVALID = "is no id of a model"


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
        (f"hf://org/tiny-1.0@{'0' * 40}", "is not in the cache"),
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
