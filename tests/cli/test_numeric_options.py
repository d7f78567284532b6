"""Every numeric option of every verb names itself when its number makes no sense."""

import argparse
import contextlib
import io

import pytest

from elastic_ckpt.cli import main

# Options for which 0 has a meaning.
ZERO = {
    *("--cost", "--port", "--rack-hosts", "--seed", "--shards", "--step"),
    # Which kinds and costs may be 0 is for the simulation to say.
    *("--fails", "--repair"),
}
NAMED = ("=NUMBER", "=HOURS", "=VALUE")
# What these verbs need besides.
NEEDED = {
    "agent": ["ram"],
    "audit": ["run"],
    "convert": ["source", "target"],
    "scale": ["run"],
    "simulate": ["run.yml"],
}


def numeric_options(parser):
    (verbs,) = (
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for verb, subparser in verbs.choices.items():
        for action in subparser._actions:
            if action.type is not None:
                is_named = str(action.metavar).endswith(NAMED)
                yield verb, action.option_strings[-1], "a=" if is_named else ""


def refused(parser, arguments):
    """What a parser says of arguments, as it ends with status 2."""
    said = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stderr(said):
        parser.parse_args(arguments)
    assert ended.value.code == 2
    return said.getvalue()


def test_number_that_makes_no_sense_is_refused():
    parser, found = main.build_parser(), set()
    for verb, option, name in numeric_options(parser):
        found.add(option)
        needless = [] if option in ZERO else ["0"]
        for number in ["-1", "-0.5", "nan", "inf", "two", "", *needless]:
            arguments = [verb, *NEEDED.get(verb, []), f"{option}={name}{number}"]
            message = f"argument {option}: {number!r} is not a"
            assert message in refused(parser, arguments)
    assert found > ZERO | {"--days", "--hosts", "--max-bytes", "--slices", "--size"}
