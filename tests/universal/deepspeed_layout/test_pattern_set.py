"""Many patterns at once match exactly the names that `re.match` matches, in time."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.deepspeed_layout import described_layout
from elastic_ckpt.universal.deepspeed_layout.described_layout import PatternSet
from elastic_ckpt.universal.formats.format_error import FormatError

ATOMS = ("a", "b", r"\.", ".", r"\d", r"\w", r"\s", "[ab]", "[^a]", "[0-9-]", "1", "{")
SIMPLE = st.tuples(
    st.sampled_from(ATOMS),
    st.sampled_from(("", "", "*", "+", "?", "*?", "{2}", "{1,2}")),
).map("".join)
PATTERNS = st.recursive(
    SIMPLE.filter(lambda text: not text.startswith("{{")),
    lambda inside: st.one_of(
        st.lists(inside, max_size=3).map("".join),
        st.lists(inside, min_size=2, max_size=3).map(
            lambda parts: f"(?:{'|'.join(parts)})"
        ),
        inside.map(lambda text: f"({text})"),
        inside.map(lambda text: f"(?:{text}){{1,3}}"),
        inside.map(lambda text: f"({text})*"),
        inside.map(lambda text: f"^{text}"),
        inside.map(lambda text: f"{text}$"),
    ),
    max_leaves=5,
)


@given(
    st.lists(PATTERNS, min_size=1, max_size=4),
    st.text("ab.1 {", min_size=1, max_size=6),
)
def test_patterns_match_what_re_matches(patterns, text):
    expected = [n for n, each in enumerate(patterns) if re.match(each, text)]
    assert PatternSet(patterns).matches(text) == expected


def test_patterns_of_deepspeed_match_whole_and_partial_names():
    patterns = [
        r"tied_modules.embed.word_embeddings.weight",
        r"\d+.self_attention.query_key_value.weight",
        r".*mlp\.dense_4h_to_h\.weight",
        "^" + re.escape("model.layers.0.self_attn.q_proj.weight") + "$",
    ]
    matches = PatternSet(patterns).matches
    assert matches("tied_modules.embed.word_embeddings.weight") == [0]
    assert matches("12.self_attention.query_key_value.weight") == [1]
    assert matches("4.mlp.dense_4h_to_h.weight.more") == [2]
    assert matches("model.layers.0.self_attn.q_proj.weight") == [3]
    assert matches("model.layers.0.self_attn.q_proj.weight.x") == []


@pytest.mark.parametrize(
    "pattern",
    [r"(a+)+$", r"(a|a)*$", r"(.*)*x", r".*.*.*.*.*.*x", r"(?:a?){30}a{30}"],
)
def test_patterns_that_take_re_forever_are_matched(pattern):
    assert not PatternSet([pattern]).matches("a" * 29 + "b") or "$" not in pattern


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(a)\1", "(?=a)", "(?<!a)", r"a\Z", "(a", "a)", "[a", "a**", "*", "[b-a]"),
        *(
            "a\\",
            "a{3,2}",
            "a{1001}",
            "(a{40}){40}",
            "a{,3}",
            r"\\{,3}",
            "[[:alpha:]]",
            "\ud800",
        ),
    ],
)
def test_other_constructs_are_refused_with_the_pattern(pattern):
    with pytest.raises(FormatError, match=re.escape(repr(pattern)[:20])):
        PatternSet([pattern])


def test_escaped_forms_of_other_constructs_are_read():
    patterns = [r"a\{,3}", r"\[:alpha:]", r"\Ab", r"(?P<x>c)\b"]
    matches = PatternSet(patterns).matches
    assert [matches(name) for name in ("a{,3}", "[:alpha:]", "b", "c.d", "cd")] == [
        *([0], [1], [2], [3], []),
    ]


def test_patterns_that_take_too_much_memory_are_refused():
    with pytest.raises(FormatError, match="too long"):
        PatternSet([".*a.{999}"] * 40)


def test_patterns_that_take_too_much_time_are_refused(monkeypatch):
    monkeypatch.setattr(described_layout, "_MOST_SECS", 0.1)
    generator = random.Random(0)
    matches = PatternSet([".*a.{999}b", ".*b.{999}a"]).matches
    names = ["".join(generator.choices("ab", k=1000)) for _ in range(1000)]
    with pytest.raises(FormatError, match="too long"):
        list(map(matches, names))


@pytest.mark.parametrize("name", ["", "a\n", "é", "a" * 1001])
def test_names_for_which_patterns_may_mean_something_else_are_refused(name):
    assert PatternSet([]).matches(name) == []
    with pytest.raises(FormatError, match="up to 1000 printable ASCII"):
        PatternSet(["a"]).matches(name)


def test_thousands_of_patterns_are_matched_at_once():
    names = [f"layers.{n}.attention.query.weight" for n in range(5000)]
    matches = PatternSet([f"^{re.escape(name)}$" for name in names]).matches
    assert [matches(name) for name in names] == [[n] for n in range(5000)]
