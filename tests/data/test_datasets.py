import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.data import datasets

KEY = "grain_train_files"


def dataset(name, patterns, weight):
    return datasets.Dataset(name=name, patterns=patterns, weight=weight)


def from_list(text):
    return datasets.from_list(text, key=KEY)


def from_file(directory, content):
    path = directory / "mixture.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return datasets.from_file(path)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a.parquet", "a.parquet"),
        ("web/*.parquet, b*.parquet", "web/*.parquet"),
        ("gs://bucket/a-*", "bucket/a-*"),
        ("a.parquet;", "a.parquet"),
        ("7", "7"),
        ("", ""),
    ],
)
def test_patterns_without_a_weight_are_one_dataset(text, name):
    assert from_list(text) == [dataset(name, text.rstrip(";"), 1.0)]


def test_a_list_gives_each_dataset_its_patterns_and_weight():
    assert from_list("a*.parquet,0.3; b*.parquet,c.parquet, 7 ;") == [
        dataset("a*.parquet", "a*.parquet", 0.3),
        dataset("b*.parquet", "b*.parquet,c.parquet", 7.0),
    ]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("/data/web.parquet,1;/data/code.parquet,1", ["web.parquet", "code.parquet"]),
        ("/data/web/*,1;/data/code/*,1", ["web/*", "code/*"]),
        ("/one/web/*,1;/two/web/*,1;x,1", ["web/*", "two/web/*", "x"]),
        ("/a/x,1;/b/x,1;/c/b/x,1", ["x", "b/x", "c/b/x"]),
        ("gs://b/web/*/part-*,1", ["web/*/part-*"]),
        ("/a/*,1;/b/*,1", ["a/*", "b/*"]),
    ],
)
def test_a_dataset_is_called_by_what_tells_it_from_the_others(text, names):
    assert [actual.name for actual in from_list(text)] == names


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), st.integers(0, 5))
def test_a_dataset_that_is_added_leaves_the_names_of_those_before_it(parts, more):
    parts = [f"/{n}/{part}/{part}" for n, part in enumerate(parts)]
    before = [actual.name for actual in from_list(";".join(f"{p},1" for p in parts))]
    added = [*parts, f"/new/{more}", "/newer/a/a"]
    now = [actual.name for actual in from_list(";".join(f"{p},1" for p in added))]
    assert now[: len(before)] == before


def test_a_file_gives_each_dataset_its_share(tmp_path):
    content = {
        "web": {"path": "web/*.parquet", "weight": 3},
        "code": {"path": "c*,d*", "weight": 1},
    }
    assert from_file(tmp_path, content) == [
        dataset("web", "web/*.parquet", 0.75),
        dataset("code", "c*,d*", 0.25),
    ]


def test_a_mixture_in_a_mixture_shares_the_weight_of_its_entry(tmp_path):
    content = {
        "web": {"path": "w", "weight": 1},
        "code": {
            "weight": 1,
            "datasets": {
                "python": {"path": "p", "weight": 3},
                "c": {
                    "weight": 1,
                    "datasets": {
                        "old": {"path": "o", "weight": 5},
                        "new": {"path": "n", "weight": 5},
                    },
                },
            },
        },
    }
    assert from_file(tmp_path, content) == [
        dataset("web", "w", 0.5),
        dataset("code/python", "p", 0.375),
        dataset("code/c/old", "o", 0.0625),
        dataset("code/c/new", "n", 0.0625),
    ]
