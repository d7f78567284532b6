"""The files of a data state: their schemas, their page, and changed files."""

import dataclasses
import gzip
import json
import pathlib

import jsonschema
import pytest

from elastic_ckpt import data as data_room
from elastic_ckpt.data import cursors, data_keys, lm, records, sharded_data, state
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.data.sources import tfrecord
from tests import formats, tfrecord_files, worlds

ROOM = pathlib.Path(data_room.__file__).parent


def validate(path):
    schema = json.loads((ROOM / "schemas" / "data_state.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    jsonschema.validate(json.loads(content), schema)


def test_what_is_written_is_of_the_schemas_and_on_the_page(tmp_path, files):
    world = worlds.World(formats.data(files["parquet"], "everything"), 2, 12)
    for _ in range(3):
        world.next()
    world.write(tmp_path)
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [
        "data_state.json",
        "shards-00000-00005.json.gz",
        "shards-00006-00011.json.gz",
    ]
    for path in paths:
        validate(path)
    names = set()
    held = cursors.read(tmp_path, range(12), state.read(tmp_path).position)
    for cursor in held.values():
        for _, each in cursors.states(cursor):
            names |= each.keys() - formats.DATASETS.keys()
    assert {"turn", "taken", "parts", cursors.FROM, "skip", "row"} <= names
    page = (ROOM / "FORMAT.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def configured():
    """A mixture, by its configuration."""
    section = data_keys.DataKeys(
        grain_train_files="web.tfrecord,1;code.tfrecord,3",
        grain_file_type="tfrecord",
        num_logical_shards=4,
        max_target_length=16,
    )
    return pipeline.from_config(section).identity()


def sharded():
    """A user's pipeline of our steps."""
    source = tfrecord.TFRecord(
        files=("web.tfrecord", "code.tfrecord"), record_format="bytes"
    )

    def make_shard(shard):
        read = records.Records(source, shard=shard, num_shards=4)
        tokens = lm.Tokens(read, documents=lm.Documents(column="data"))
        return lm.Rows(tokens, length=16, window=5, shard=shard)

    data = sharded_data.sharded(make_shard, pipeline="golden, version 1")
    return data.identity()


@pytest.mark.parametrize("make", [configured, sharded], ids=lambda make: make.__name__)
def test_a_state_has_these_bytes(make, golden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for first, name in ((0, "web.tfrecord"), (100, "code.tfrecord")):
        tfrecord_files.write(name, (b"text %d" % n for n in range(first, first + 40)))
    saved = state.DataState(
        engine="sharded",
        position={"batches": [[12, 8]]},
        pipeline=make(),
        left_out=((12, 24), (36, 48)),
        progress=state.Progress(step=6, begun=1) if make is sharded else None,
    )
    state.write(tmp_path, saved)
    assert state.read(tmp_path) == saved
    path = tmp_path / state.FILE_NAME
    golden(f"data_state_v1_{make.__name__}.json", path.read_text())
    validate(path)
    position = {"global_next_index": 96}
    saved = dataclasses.replace(saved, engine="positional", position=position)
    state.write(tmp_path, saved)
    validate(path)


def test_cursors_have_these_bytes(tmp_path, golden):
    values = {3: None, 4: {"row": 2, "state": {"a": 7}}, 5: {"row": 0, "ended": {}}}
    cursors.write(tmp_path, values, {"batches": [[24, 3], [12, 2]]})
    path = tmp_path / "shards-00003-00005.json.gz"
    content = path.read_bytes()
    # Without the time of writing; elsewhere it may be compressed to other bytes.
    assert content[4:8] == bytes(4)
    golden("cursors_v1.json", gzip.decompress(content).decode())
    validate(path)
