"""Many patterns at once match exactly the names that `re.match` matches, in time."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.deepspeed_layout.pattern_set import PatternSet
from elastic_ckpt.universal.formats.format_error import FormatError

ATOMS = ("a", "b", r"\.", ".", r"\d", r"\w", r"\s", "[ab]", "[^a]", "[0-9-]", "1", "{")
SIMPLE = st.tuples(
    st.sampled_from(ATOMS),
    st.sampled_from(("", "", "*", "+", "?", "*?", "{2}", "{,2}", "{,}")),
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


@given(st.lists(PATTERNS, min_size=1, max_size=4), st.text("ab.1 {", max_size=6))
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
        *(r"(a)\1", "(?=a)", "(?P<x>a)", r"\b", "(a", "a)", "[a", "a**", "*", "[b-a]"),
        *("a\\", "a{3,2}", "a{99999}", "(" * 100 + ")" * 100),
    ],
)
def test_other_constructs_are_refused_with_the_pattern(pattern):
    with pytest.raises(FormatError, match=re.escape(repr(pattern)[:20])):
        PatternSet([pattern])


@pytest.mark.parametrize("pattern", ["((a{999}){999}){999}", ".*a.{9999}" * 40])
def test_patterns_that_are_too_long_are_refused(pattern):
    with pytest.raises(FormatError, match="too long"):
        PatternSet([pattern]).matches("a" * 100_000)


def test_machines_with_many_states_are_refused():
    matches = PatternSet([".*a.{2000}b"]).matches
    with pytest.raises(FormatError, match="too long"):
        matches("ab" * 50_000 + "a" * 50_000)
