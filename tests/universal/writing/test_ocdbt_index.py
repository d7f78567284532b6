"""TensorStore reads indices that refer to values in files."""

import random

import pytest
from etils import epath

from elastic_ckpt.tiers.persistent import ocdbt
from elastic_ckpt.universal.writing import ocdbt_index
from elastic_ckpt.universal.writing.ocdbt_index import Extent
from tests import ocdbt_extents


def written(directory, count):
    """Values of some keys in two files, their extents, and the index."""
    generator = random.Random(count)
    values, extents = {}, {}
    for file in ("d/first", "d/second"):
        content = bytearray()
        for number in generator.sample(range(10 * count), count):
            key = f"layers.{number}/{file}/c/0"
            values[key] = generator.randbytes(generator.randrange(1, 300))
            extents[key] = Extent(file, len(content), len(values[key]))
            content += values[key]
        path = epath.Path(directory) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    ocdbt_index.write(epath.Path(directory), extents)
    return values, extents


def read(directory):
    store = ocdbt.open_store(directory, ocdbt.new_context())
    return {
        key.decode(): store.read(key).result().value for key in store.list().result()
    }


# The last index is far larger than TensorStore makes a node.
@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 50, 60_000])
def test_tensorstore_reads_the_values_and_merges_them(tmp_path, count):
    values, extents = written(tmp_path / "store", count)
    if count < 1000:
        assert read(tmp_path / "store") == values
    assert {
        key: Extent(*each)
        for key, each in ocdbt_extents.read(tmp_path / "store").items()
    } == extents
    ocdbt.merge(tmp_path, ["store"])
    if count < 1000:
        assert read(tmp_path) == values
    else:
        merged = ocdbt.open_store(tmp_path, ocdbt.new_context())
        for key in random.Random(0).sample(sorted(values), 100):
            assert merged.read(key).result().value == values[key]


def test_a_new_index_replaces_the_old_one(tmp_path):
    written(tmp_path, 3)
    values, _ = written(tmp_path, 4)
    assert read(tmp_path) == values


def test_an_index_that_is_damaged_is_an_error(tmp_path):
    written(tmp_path, 3)
    content = bytearray((tmp_path / "nodes").read_bytes())
    content[30] ^= 1
    (tmp_path / "nodes").write_bytes(content)
    with pytest.raises(ValueError, match="CRC-32C"):
        read(tmp_path)
