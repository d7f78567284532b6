"""Models of the Hugging Face hub are found in its cache, and never downloaded."""

import pathlib
import shutil

import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import files
from elastic_ckpt.universal.formats.format_error import FormatError

DATA = pathlib.Path(__file__).parent / "data" / "weights"
COMMIT, OLDER = "0123456789abcdef" * 2 + "01234567", "f" * 40


@pytest.fixture
def cache(tmp_path):
    """A cache as `huggingface_hub` fills it: snapshots are links to blobs."""
    folder = tmp_path / "hub" / "models--org--tiny-1.0"
    (folder / "blobs").mkdir(parents=True)
    (folder / "refs" / "refs" / "pr").mkdir(parents=True)
    for commit in (COMMIT, OLDER):
        (folder / "snapshots" / commit).mkdir(parents=True)
    for file in (DATA / "single").iterdir():
        shutil.copy(file, folder / "blobs")
        (folder / "snapshots" / COMMIT / file.name).symlink_to(
            f"../../blobs/{file.name}"
        )
    shutil.copy(DATA / "no_crc.pt", folder / "snapshots" / OLDER)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "refs" / "v1").write_text(OLDER)
    (folder / "refs" / "refs" / "pr" / "1").write_text(OLDER)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("path", "commit"),
    [
        ("hf://org/tiny-1.0", COMMIT),
        ("hf://org/tiny-1.0@v1", OLDER),
        ("hf://org/tiny-1.0@refs/pr/1", OLDER),
        (f"hf://org/tiny-1.0@{OLDER}", OLDER),
    ],
)
def test_a_revision_leads_to_its_snapshot(cache, path, commit):
    found = hugging_face.snapshot(path, {"HF_HUB_CACHE": str(cache)})
    assert found == cache / "models--org--tiny-1.0" / "snapshots" / commit


def test_a_model_of_the_cache_opens_by_its_id(cache, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(cache.parent))
    checkpoint = opening.open_checkpoint("hf://org/tiny-1.0")
    assert checkpoint.format == "PyTorch"
    assert checkpoint.values["config/hidden_size"] == 4
    assert len(opening.open_checkpoint("hf://org/tiny-1.0@v1").tensors) == 4


def test_the_cache_is_where_the_hub_has_it():
    def lookup(**environ):
        with pytest.raises(FormatError) as error:
            hugging_face.snapshot("hf://org/name", environ)
        return str(error.value)

    assert "(/c/models--org--name)" in lookup(HF_HUB_CACHE="/c", HF_HOME="/h")
    assert "(/h/hub/models--org--name)" in lookup(HF_HOME="/h")
    assert "(/x/huggingface/hub/models--" in lookup(XDG_CACHE_HOME="/x")
    assert f"({pathlib.Path.home()}/.cache/huggingface/hub/models--" in lookup()


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("hf://org/other", "run `hf download org/other`, or set HF_HOME"),
        ("hf://gpt2", "run `hf download gpt2`"),
        ("hf://org/tiny-1.0@v2", "run `hf download org/tiny-1.0 --revision v2`"),
        (f"hf://org/tiny-1.0@{'0' * 40}", "is not in the cache"),
    ],
)
def test_what_is_not_in_the_cache_is_an_error_that_says_how_to_get_it(
    cache, path, match
):
    with pytest.raises(FormatError, match=match):
        hugging_face.snapshot(path, {"HF_HUB_CACHE": str(cache)})


@pytest.mark.parametrize(
    "path",
    [
        *("hf://", "hf://../x", "hf://a/b/c", "hf://org/name@", "hf://org/.."),
        "hf://org/name@x/../../y",
    ],
)
def test_what_is_no_id_is_refused(cache, path):
    with pytest.raises(FormatError, match="is no id of a model"):
        hugging_face.snapshot(path, {"HF_HUB_CACHE": str(cache)})
