import sys
import types

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.sources import arrayrecord, decoded
from tests import corpora
from tests.source_contract import read_all


def test_a_record_is_found_by_its_number_over_all_files(tmp_path):
    data = [b"text %d " % number for number in range(30)]
    files = tuple(
        corpora.write_records(tmp_path / name, some)
        for name, some in (("a", data[:1]), ("b", []), ("c", data[1:]))
    )
    assert [arrayrecord.record(files, number) for number in range(30)] == data
    corpora.spoil(files[2], data[23])
    assert arrayrecord.record(files, 22) == data[22]
    with pytest.raises(errors.DataError, match=r"/c, record 22: corrupt"):
        arrayrecord.record(files, 23)


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
    with pytest.raises(errors.ConfigError, match="forkserver"):
        read_all(dataset, 1, num_epochs=1)
    with pytest.raises(errors.ConfigError, match="forkserver"):
        arrayrecord.record(files, 0)
