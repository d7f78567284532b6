"""TensorStore reads indices that refer to values in files."""

import pathlib
import random

import pytest
import tensorstore as ts
from etils import epath

from elastic_ckpt.tiers.persistent import ocdbt
from elastic_ckpt.universal.writing import ocdbt_index
from elastic_ckpt.universal.writing.ocdbt_index import Extent


def written(directory, count):
    """Values of some keys in two files, their extents, and the index."""
    generator = random.Random(count)
    values, extents = {}, {}
    for file in ("d/first", "d/second"):
        content = b""
        for number in generator.sample(range(10 * count), count):
            key = f"layers.{number}/{file}/c/0"
            values[key] = generator.randbytes(generator.randrange(1, 300))
            extents[key] = Extent(
                file=file, offset=len(content), num_bytes=len(values[key])
            )
            content += values[key]
        path = pathlib.Path(directory) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    ocdbt_index.write(epath.Path(directory), extents)
    return values, extents


def read(directory):
    store = ocdbt.open_store(directory, ocdbt.new_context())
    return {
        key.decode(): store.read(key).result().value for key in store.list().result()
    }


# Leaves below a root, and a leaf.
@pytest.mark.parametrize("count", [1, 2, 50])
@pytest.mark.parametrize("leaf_keys", [3, 2**14])
def test_tensorstore_reads_the_values_and_merges_them(
    tmp_path, monkeypatch, count, leaf_keys
):
    monkeypatch.setattr(ocdbt_index, "_LEAF_KEYS", leaf_keys)
    values, extents = written(tmp_path / "store", count)
    assert read(tmp_path / "store") == values
    assert ocdbt_index.read(tmp_path / "store", ts.Context()) == extents
    ocdbt.merge(tmp_path, ["store"])
    assert read(tmp_path) == values


def test_extents_of_a_store_that_tensorstore_wrote_are_those_of_its_values(tmp_path):
    spec = ocdbt.store_spec(tmp_path)
    config = {"max_decoded_node_bytes": 200}
    context = ocdbt.new_context()
    store = ts.KvStore.open({**spec, "config": config}, context=context).result()
    values = {f"w/c/{number}": bytes([number]) * 200 for number in range(30)}
    for key, value in values.items():
        store.write(key, value).result()
    extents = ocdbt_index.read(tmp_path, ts.Context())
    assert extents.keys() == values.keys()
    for key, extent in extents.items():
        content = (tmp_path / extent.file).read_bytes()
        stop = extent.offset + extent.num_bytes
        assert content[extent.offset : stop] == values[key]


def test_a_new_index_replaces_the_old_one_and_its_nodes(tmp_path):
    written(tmp_path, 3)
    values, _ = written(tmp_path, 4)
    assert read(tmp_path) == values
    assert len(list((tmp_path / "nodes").iterdir())) == 1


def test_an_index_that_is_damaged_is_an_error(tmp_path):
    written(tmp_path, 3)
    (nodes,) = (tmp_path / "nodes").iterdir()
    content = bytearray(nodes.read_bytes())
    content[30] ^= 1
    nodes.write_bytes(content)
    with pytest.raises(ValueError, match="CRC-32C"):
        ocdbt_index.read(tmp_path, ts.Context())
