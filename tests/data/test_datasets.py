import dataclasses
import json

import pytest

from elastic_ckpt.data import datasets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.parquet", [("a.parquet", "a.parquet", 1.0)]),
        ("a.parquet;", [("a.parquet", "a.parquet", 1.0)]),
        ("web/*, b*", [("web/*", "web/*, b*", 1.0)]),
        ("gs://bucket/a-*", [("bucket/a-*", "gs://bucket/a-*", 1.0)]),
        ("7", [("7", "7", 1.0)]),
        ("", [("", "", 1.0)]),
        ("a*,0.3; b*,c, 7 ;", [("a*", "a*", 0.3), ("b*", "b*,c", 7.0)]),
        # A name tells a dataset from those before it.
        ("/a/w/*,1;/a/c/*,1", [("w/*", "/a/w/*", 1.0), ("c/*", "/a/c/*", 1.0)]),
        ("/a/w/*,1;/b/w/*,1", [("w/*", "/a/w/*", 1.0), ("b/w/*", "/b/w/*", 1.0)]),
        (
            "/a/x,1;/b/x,1;/c/b/x,1",
            [("x", "/a/x", 1.0), ("b/x", "/b/x", 1.0), ("c/b/x", "/c/b/x", 1.0)],
        ),
        ("gs://b/w/*/p-*,1", [("w/*/p-*", "gs://b/w/*/p-*", 1.0)]),
    ],
)
def test_a_list_gives_each_dataset_its_name_patterns_and_weight(text, expected):
    listed = datasets.from_list(text, key="grain_train_files")
    assert list(map(dataclasses.astuple, listed)) == expected


def test_a_mixture_in_a_mixture_shares_the_weight_of_its_entry(tmp_path):
    versions = {"old": {"path": "o", "weight": 5}, "new": {"path": "n", "weight": 5}}
    code = {
        "python": {"path": "c*,d*", "weight": 3},
        "c": {"weight": 1, "datasets": versions},
    }
    web = {"path": "web/*.parquet", "weight": 2}
    path = tmp_path / "mixture.json"
    path.write_text(json.dumps({"web": web, "code": {"weight": 2, "datasets": code}}))
    assert list(map(dataclasses.astuple, datasets.from_file(path))) == [
        ("web", "web/*.parquet", 0.5),
        ("code/python", "c*,d*", 0.375),
        ("code/c/old", "o", 0.0625),
        ("code/c/new", "n", 0.0625),
    ]
