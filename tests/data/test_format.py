"""The files of a data state: their schemas, their page, and changed files."""

import gzip
import json
import pathlib

import jsonschema
import pytest

from elastic_ckpt import data as data_room
from elastic_ckpt.data import (
    cursors,
    data_keys,
    lm,
    records,
    sharded_data,
    state,
)
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.data.sources import tfrecord
from tests import formats, tfrecord_files, worlds

ROOM = pathlib.Path(data_room.__file__).parent
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def validate(path):
    kind = "data_state" if path.name == "data_state.json" else "shard_cursors"
    schema = json.loads((ROOM / "schemas" / f"{kind}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    jsonschema.validate(json.loads(content), schema)


@pytest.fixture
def written(tmp_path, files):
    """The state of a mixture of three datasets on two hosts, after three batches."""
    data = formats.data(files["parquet"], "everything")
    world = worlds.World(data, 2, formats.NUM_SHARDS)
    for _ in range(3):
        world.next()
    world.write(tmp_path)
    return tmp_path


def test_what_is_written_is_of_the_schemas(written):
    paths = sorted(written.iterdir())
    assert [path.name for path in paths] == [
        "data_state.json",
        "shards-00000-00005.json.gz",
        "shards-00006-00011.json.gz",
    ]
    for path in paths:
        validate(path)


def test_the_golden_files_are_of_the_schemas(tmp_path):
    for name, kept in (
        ("data_state.json", "data_state_v1.json"),
        ("data_state.json", "data_state_v1_left_out.json"),
        ("cursors.json", "cursors_v1.json"),
    ):
        path = tmp_path / name
        path.write_bytes((GOLDEN / kept).read_bytes())
        validate(path)


@pytest.fixture(params=["configured", "sharded"])
def variant(request, tmp_path, monkeypatch):
    """A kind of pipeline over two small files, and the pipeline."""
    monkeypatch.chdir(tmp_path)
    names = ("web.tfrecord", "code.tfrecord")
    for first, name in ((0, names[0]), (100, names[1])):
        tfrecord_files.write(name, (b"text %d" % n for n in range(first, first + 40)))
    if request.param == "configured":
        section = data_keys.DataKeys(
            grain_train_files="web.tfrecord,1;code.tfrecord,3",
            grain_file_type="tfrecord",
            num_logical_shards=4,
            max_target_length=16,
        )
        return request.param, pipeline.from_config(section)
    source = tfrecord.TFRecord(files=names, record_format="bytes")

    def make_shard(shard):
        read = records.Records(source, shard=shard, num_shards=4)
        tokens = lm.Tokens(read, documents=lm.Documents(column="data"))
        return lm.Rows(tokens, length=16, window=5, shard=shard)

    return request.param, sharded_data.sharded(make_shard, pipeline="golden, version 1")


def test_a_pipeline_is_described_by_these_bytes(variant, golden, tmp_path):
    kind, data = variant
    saved = state.DataState(
        engine=data.engine,
        position={"batches": [[12, 1]]},
        pipeline=data.identity(),
    )
    state.write(tmp_path, saved)
    path = tmp_path / state.FILE_NAME
    golden(f"data_state_v1_{kind}.json", path.read_text())
    validate(path)


def test_the_page_names_every_field_that_a_cursor_may_have(written):
    page = (ROOM / "FORMAT.md").read_text()
    saved = state.read(written)
    names = set()
    for cursor in cursors.read(
        written, range(formats.NUM_SHARDS), saved.position
    ).values():
        for part in cursors.parts(cursor):
            names |= part.keys() - formats.DATASETS.keys()
    assert {"turn", "taken", "parts", "from", "skip", "row"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
