"""Dims, names and arithmetic are parsed, or refused with the place of the mistake."""

import pytest

from elastic_ckpt.universal.rules import dims, name_pattern, size_expression
from elastic_ckpt.universal.rules.layout import LayoutError


def test_the_names_of_each_part_of_a_sum():
    parsed = dims.parse("(kv@tp (q + k) d)@(dp ep) 1")
    assert parsed.name_sets == [
        frozenset({"kv", "q", "d"}),
        frozenset({"kv", "k", "d"}),
    ]
    assert parsed.axes == {"tp", "dp", "ep"}
    assert len(parsed.nodes) == 2


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("a (b", 5, "expected )"),
        ("a b)", 4, "expected a name, 1 or (, not )"),
        ("a $ b", 3, "unexpected '$'"),
        ("a 2", 3, "unexpected '2'"),
        ("a 12", 3, "unexpected '1'"),
        ("a@", 3, "expected a rank axis"),
        ("a@(tp", 6, "expected a rank axis"),
        ("a@()", 4, "expected a rank axis"),
        ("a + b", 3, "not +"),
        ("(a + )", 6, "not )"),
        ("(" * 99, 34, "nested too deeply"),
    ],
)
def test_an_error_has_the_column(text, column, problem):
    with pytest.raises(LayoutError) as caught:
        dims.parse(text)
    assert f"column {column} of {text!r}" in str(caught.value)
    assert problem in str(caught.value)


def test_names_are_distinct_where_they_have_to_be():
    with pytest.raises(LayoutError, match="'a' occurs twice"):
        dims.parse("(a b) a")
    with pytest.raises(LayoutError, match="same names, a b; name them differently"):
        dims.parse("(a + a) b")


MALFORMED = "{ } a{b {} {1} {a}{b} {a}.{a} {a:int} {(a,b)} {a+} {a+0} {a-1} {a+1:path}"


@pytest.mark.parametrize("text", MALFORMED.split())
def test_a_malformed_name_is_refused(text):
    with pytest.raises(LayoutError, match=r"capture|brace"):
        name_pattern.parse(text)


def groups(text, name, numbers=()):
    pattern = name_pattern.parse(text)
    match = pattern.expression(numbers).fullmatch(name)
    if match is None:
        return None
    # The skeleton is a necessary condition.
    assert pattern.skeleton(numbers).fullmatch(name_pattern.skeleton(name))
    return match.groups()


def test_captures_match_as_the_page_states():
    assert groups("l.{n}.w", "l.12.w", {"n"}) == ("12",)
    assert groups("l.{n}.w", "l.x.w", {"n"}) is None
    assert groups("l.{n}.w", "l.012.w", {"n"}) is None
    assert groups("l.{n}.w", "l.x1y.w") == ("x1y",)
    assert groups("l.{n}.w", "l.x.y.w") is None
    assert groups("l/{n:path}/w", "l/x.1/y/w") == ("x.1/y",)
    assert groups("l{n:02}", "l07") == ("07",)
    assert groups("l{n:02}", "l7") is None
    assert groups("l{n:02}", "l123") == ("123",)
    assert groups("fc1{n}", "fc123", {"n"}) == ("23",)
    assert groups("{(a b)}x", "5x") == ("5",)
    assert groups("{n}1", "x11") == ("x1",)
    assert groups("{n+1}.w", "12.w") == ("12",)
    assert groups("{n + 10:02}.w", "07.w") == ("07",)
    assert groups("{n+1}.w", "x.w") is None


def test_a_glob_matches_any_text():
    pattern = name_pattern.glob("*.inv[1]*").expression(())
    assert pattern.fullmatch("a.b.inv[1]")
    assert not pattern.fullmatch("a.b.inv1")


def test_arithmetic_on_sizes_has_the_value_of_python():
    sizes = {"d": 16, "x": 3}
    for text in ("d ** 0.5", "-d + x * 2", "1 / (d - x)", "d // 5", "7"):
        assert size_expression.result(text, sizes) == eval(text, {}, sizes)
    assert size_expression.names("d ** x + d") == {"d", "x"}
    assert size_expression.result(2.5, {}) == 2.5


@pytest.mark.parametrize(
    "text",
    ["d.real", "f(d)", "d if d else 1", "'a'", "d +", "[1]", "d and d", "not d",
     "1e999", "1 / 0", "9.0 ** 99999", "(-8) ** 0.5", "1" * 300, "True", "2j"],
)  # fmt: skip
def test_other_expressions_are_refused(text):
    with pytest.raises(LayoutError):
        size_expression.result(text, {"d": 1})
