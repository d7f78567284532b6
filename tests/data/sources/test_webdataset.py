"""WebDataset's tar archives."""

import tarfile

import pytest

from elastic_ckpt.data.sources import source, webdataset
from tests.data.sources.test_contract import tar
from tests.source_contract import in_order


@pytest.mark.parametrize(
    ("kind", "num_shards"),
    [(tarfile.USTAR_FORMAT, 20), (tarfile.GNU_FORMAT, 1), (tarfile.PAX_FORMAT, 3)],
)
def test_samples_are_the_files_of_one_name(tmp_path, monkeypatch, kind, num_shards):
    monkeypatch.setattr(source, "BLOCK_RECORDS", 8)
    # Names that need headers of their own.
    long = "" if kind == tarfile.USTAR_FORMAT else "a" * 150 + "/"
    samples = {
        f"{long}images/{number:05d}": {
            "jpg": bytes([number]) * (40 + number),
            "txt": b"caption %d" % number,
            "seg.png": b"" if number % 3 else b"mask",
        }
        for number in range(43)
    }
    members = [
        (f"{key}.{field}", content)
        for key, fields in samples.items()
        for field, content in fields.items()
    ]
    directory = tarfile.TarInfo("images.all")
    directory.type = tarfile.DIRTYPE
    (tmp_path / "a").write_bytes(directory.tobuf() + tar(members, kind))
    dataset = webdataset.WebDataset(files=(str(tmp_path / "a"),))
    assert in_order(dataset, num_shards, shuffle_seed=5) == [
        {"__key__": key, **fields, "record": number}
        for number, (key, fields) in enumerate(samples.items())
    ]
