import sys
import types

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import arrayrecord, decoded, source
from tests import corpora
from tests.source_contract import read_all


def test_a_corrupt_chunk_loses_its_records_and_no_other(tmp_path):
    data = [b"text %d " % number for number in range(100)]
    files = tuple(
        corpora.write_records(
            tmp_path / name, some, options="group_size:10,uncompressed"
        )
        for name, some in (("a", data[:1]), ("b", []), ("c", data[1:]))
    )
    dataset = arrayrecord.ArrayRecord(files=files)
    source.indexes(dataset)
    corpora.spoil(files[2], b"text 33 ")
    with pytest.raises(errors.DataError, match=r"/c, record 3\d: corrupt"):
        read_all(dataset, 3, num_epochs=1)
    actual = read_all(dataset, 3, num_epochs=1, skip_corrupt=True)
    kept = [*range(31), *range(41, 100)]
    assert sorted(element["record"] for element in actual) == kept
    for number in kept:
        assert arrayrecord.record(files, number) == data[number]
    with pytest.raises(errors.DataError, match=r"/c, record 32: corrupt"):
        arrayrecord.record(files, 33)


def test_a_worker_that_pytorch_has_forked_is_refused_before_it_crashes(
    tmp_path, monkeypatch
):
    files = (corpora.write_records(tmp_path / "a", [b"a"] * 3),)
    dataset = arrayrecord.ArrayRecord(files=files)
    loader = types.SimpleNamespace(get_worker_info=lambda: None)
    monkeypatch.setitem(sys.modules, "torch.utils.data", loader)
    monkeypatch.setattr(arrayrecord, "_LOADED_IN", 0)
    assert len(read_all(dataset, 1, num_epochs=1)) == 3
    loader.get_worker_info = lambda: "worker 0 of 2"
    decoded._KEPT.begin()
    for read in (
        lambda: read_all(dataset, 1, num_epochs=1),
        lambda: arrayrecord.record(files, 0),
    ):
        with pytest.raises(errors.ConfigError, match="forkserver"):
            read()
