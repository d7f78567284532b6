"""WebDataset's tar archives."""

import io
import pathlib
import tarfile

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import source, webdataset
from tests import source_contract


def samples(number, *, size=40):
    return [
        {
            "__key__": f"images/{each:05d}",
            "jpg": bytes([each % 256]) * (size + each),
            "txt": f"caption {each}".encode(),
            "seg.png": b"" if each % 3 else b"mask",
        }
        for each in range(number)
    ]


def written(path, held, kind=tarfile.USTAR_FORMAT, long=""):
    with tarfile.open(path, "w", format=kind) as archive:
        directory = tarfile.TarInfo("images")
        directory.type = tarfile.DIRTYPE
        archive.addfile(directory)
        for sample in held:
            for field, content in sample.items():
                if field != "__key__":
                    member = tarfile.TarInfo(f"{long}{sample['__key__']}.{field}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return str(path)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(source, "BLOCK_RECORDS", 8)


def read(dataset, num_shards=1, **reading):
    elements = source_contract.read_all(
        dataset, num_shards, **{"num_epochs": 1, **reading}
    )
    elements.sort(key=lambda element: element["record"])
    return [{n: v for n, v in each.items() if n != "record"} for each in elements]


@pytest.mark.parametrize(
    ("kind", "num_shards"),
    [(tarfile.USTAR_FORMAT, 20), (tarfile.GNU_FORMAT, 1), (tarfile.PAX_FORMAT, 3)],
)
def test_samples_are_the_files_of_one_name(tmp_path, kind, num_shards):
    held = samples(43)
    # Names that need headers of their own.
    long = "" if kind == tarfile.USTAR_FORMAT else "a" * 150 + "/"
    file = written(tmp_path / "a.tar", held, kind, long)
    dataset = webdataset.WebDataset(files=(file,))
    expected = [{**each, "__key__": long + each["__key__"]} for each in held]
    assert read(dataset, num_shards, shuffle_seed=5) == expected


def test_the_state_before_every_sample_can_be_resumed_from(tmp_path):
    dataset = webdataset.WebDataset(files=(written(tmp_path / "a.tar", samples(43)),))
    source_contract.assert_resumes_everywhere(
        lambda: source_contract.read(dataset, 1, 3, shuffle_seed=7, num_epochs=2)
    )


def test_fields_that_are_not_named_are_not_read(tmp_path):
    file = written(tmp_path / "a.tar", samples(3))
    dataset = webdataset.WebDataset(files=(file,), columns=("txt",))
    assert read(dataset) == [{"txt": f"caption {n}".encode()} for n in range(3)]
    lacking = webdataset.WebDataset(files=(file,), columns=("cls",))
    with pytest.raises(errors.DataError, match=r"sample 0: no field \['cls'\]"):
        read(lacking)


@pytest.mark.parametrize("kept", [700, 0.9])
def test_an_archive_that_is_cut_short_is_named(tmp_path, kept):
    path = pathlib.Path(written(tmp_path / "a.tar", samples(30)))
    content = path.read_bytes().rstrip(b"\0")
    kept = int(kept * len(content)) if isinstance(kept, float) else kept
    path.write_bytes(content[:kept])
    with pytest.raises(errors.DataError, match=r"a\.tar.*restore"):
        source.indexes(webdataset.WebDataset(files=(str(path),)))


def test_a_damaged_header_loses_the_rest_of_its_block_wherever_reading_began(tmp_path):
    path = pathlib.Path(written(tmp_path / "a.tar", samples(24)))
    dataset = webdataset.WebDataset(files=(str(path),))
    source.indexes(dataset)
    content = path.read_bytes()
    at = content.index(b"images/00013.txt")
    path.write_bytes(content[:at] + b"\xff" * 200 + content[at + 200 :])
    with pytest.raises(errors.DataError, match=r"a\.tar, sample \d+: corrupt"):
        read(dataset)
    kept = read(dataset, 5, skip_corrupt=True)
    assert kept == samples(24)[:13] + samples(24)[16:]
    source_contract.assert_resumes_everywhere(
        lambda: source_contract.read(dataset, 0, 1, num_epochs=1, skip_corrupt=True)
    )
