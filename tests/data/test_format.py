"""The files of a data state: their schemas, their page, and changed files."""

import json
import pathlib

import jsonschema
import pytest

from elastic_ckpt import data as data_room
from elastic_ckpt.data import (
    cursors,
    data_keys,
    records,
    sharded_data,
    shuffling,
    state,
)
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.data.sources import tfrecord
from tests import formats, worlds

ROOM = pathlib.Path(data_room.__file__).parent
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def validate(path):
    kind = "data_state" if path.name == "data_state.json" else "shard_cursors"
    schema = json.loads((ROOM / "schemas" / f"{kind}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(path.read_text()), schema)


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
        "shards-00000-00005.json",
        "shards-00006-00011.json",
    ]
    for path in paths:
        validate(path)


def test_the_schemas_refuse_what_is_not_of_the_format(written):
    path = written / "shards-00000-00005.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"process": 3}))
    with pytest.raises(jsonschema.ValidationError, match="'process' was unexpected"):
        validate(path)


def test_the_golden_files_are_of_the_schemas(tmp_path):
    for name, kept in (
        ("data_state.json", "data_state_v1.json"),
        ("data_state.json", "data_state_v1_left_out.json"),
        ("shards-00003-00005.json", "cursors_v2.json"),
    ):
        path = tmp_path / name
        path.write_bytes((GOLDEN / kept).read_bytes())
        validate(path)


OLD = {
    "configured": "data_state_v1_configured_before_samples.json",
    "sharded": "data_state_v1_sharded_before_steps.json",
}


@pytest.fixture(params=OLD)
def variant(request, tmp_path, monkeypatch):
    """A kind of pipeline over two small files, and the pipeline."""
    monkeypatch.chdir(tmp_path)
    names = ("web.tfrecord", "code.tfrecord")
    for first, name in ((0, names[0]), (100, names[1])):
        tfrecord.write(name, (b"text %d" % n for n in range(first, first + 40)))
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
        return shuffling.WindowShuffle(read, window_size=5, seed=shard)

    return request.param, sharded_data.sharded(make_shard, pipeline="golden, version 1")


def test_a_pipeline_is_described_by_these_bytes(variant, golden, tmp_path):
    kind, data = variant
    content = state.to_bytes(
        state.DataState(
            engine=data.engine, position={"stream_row": 12}, pipeline=data.identity()
        )
    )
    golden(f"data_state_v1_{kind}.json", content.decode())
    (tmp_path / "data_state.json").write_bytes(content)
    validate(tmp_path / "data_state.json")


def test_the_state_of_an_older_program_loads_with_its_pipeline(variant, tmp_path):
    kind, data = variant
    path = tmp_path / "data_state.json"
    path.write_bytes((GOLDEN / OLD[kind]).read_bytes())
    validate(path)
    saved = state.read(tmp_path)
    assert saved.position == {"stream_row": 12}
    data = data.continuing(saved.pipeline)
    state.check_same_pipeline(saved, "sharded", data.identity())
    changed = data.identity() | {"num_logical_shards": 5}
    with pytest.raises(state.errors.DataError, match="num_logical_shards: saved 4, no"):
        state.check_same_pipeline(saved, "sharded", changed)


def test_the_page_names_every_field_that_a_cursor_may_have(written):
    page = (ROOM / "FORMAT.md").read_text()
    saved = state.read(written)
    names = set()
    for cursor in cursors.read(
        written, range(formats.NUM_SHARDS), saved.position
    ).values():
        for part in cursors.parts(cursor):
            names |= part.keys() - formats.DATASETS.keys()
    assert {"turn", "taken", "parts", "parent", "window"} <= names
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_a_changed_list_of_files_is_an_error_that_names_the_change(files):
    dataset = {
        part.name: pipeline.source.identity(part.source) for part in files["parquet"]
    }

    def saved(datasets):
        weighed = {name: {"weight": 1, **own} for name, own in datasets.items()}
        return {"datasets": weighed}

    before = state.DataState(engine="sharded", position={}, pipeline=saved(dataset))
    listed = dataset["web"]["files"]
    renamed = [["new.parquet", *listed[0][1:]], *listed[1:]]
    grown = [[listed[0][0], 9999, 123, listed[0][3]], *listed[1:]]
    for now, message in (
        (listed[1:], "datasets.web.files: web-0.parquet is gone"),
        (renamed, "web-0.parquet is gone; datasets.web.files: new.parquet is new"),
        (grown, f"had {listed[0][1]} bytes and 90 records, now 9999 and 123"),
        (listed[::-1], "the files are in another order"),
    ):
        changed = saved(dataset | {"web": dataset["web"] | {"files": now}})
        with pytest.raises(state.errors.DataError, match=message):
            state.check_same_pipeline(before, "sharded", changed)
    # Weights may change, and datasets come and go; not all of them at once.
    new = dataset["web"] | {"files": listed[1:]}
    for kept in ({"web"}, {"web", "books", "code"}, {"books"}):
        datasets = {name: dataset[name] for name in kept} | {"new": new}
        changed = {"datasets": {n: {"weight": 7, **own} for n, own in datasets.items()}}
        state.check_same_pipeline(before, "sharded", changed)
    with pytest.raises(state.errors.DataError, match="datasets: saved"):
        state.check_same_pipeline(before, "sharded", saved({"new": new}))
    # In data that ends they may not: shards that have ended would not read them.
    finite = state.DataState(
        engine="sharded", position={}, pipeline=before.pipeline | {"num_epoch": 1}
    )
    added = saved(dataset | {"new": new}) | {"num_epoch": 1}
    with pytest.raises(state.errors.DataError, match=r"now .'books', 'code', 'new', "):
        state.check_same_pipeline(finite, "sharded", added)
