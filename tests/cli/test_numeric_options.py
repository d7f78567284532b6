"""Every numeric option of every verb names itself when its number makes no sense."""

import argparse

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


def numeric_options():
    (verbs,) = (
        action
        for action in main.build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    for verb, parser in verbs.choices.items():
        for action in parser._actions:
            if action.type is not None:
                is_named = str(action.metavar).endswith(NAMED)
                yield verb, action.option_strings[-1], "a=" if is_named else ""


@pytest.mark.parametrize(("verb", "option", "name"), [*numeric_options()])
def test_a_number_that_makes_no_sense_is_refused(capsys, verb, option, name):
    needless = [] if option in ZERO else ["0"]
    for number in ["-1", "-0.5", "nan", "inf", "two", "", *needless]:
        with pytest.raises(SystemExit) as ended:
            main.main([verb, *NEEDED.get(verb, []), f"{option}={name}{number}"])
        assert ended.value.code == 2
        assert f"argument {option}: {number!r} is not a" in capsys.readouterr().err


def test_the_numeric_options_are_known():
    found = {option for _, option, _ in numeric_options()}
    assert found > ZERO | {"--days", "--hosts", "--max-bytes", "--slices", "--size"}


def test_a_name_without_a_number_is_refused(capsys):
    for option in ("--fails", "--cost"):
        for given in ("machine", "=1", "a b=1"):
            with pytest.raises(SystemExit):
                main.main(["simulate", "run.yml", option, given])
            message = f"argument {option}: {given!r}: write NAME=NUMBER"
            assert message in capsys.readouterr().err
