"""WebDataset's tar archives."""

import io
import tarfile

import pytest

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
