"""Every numeric option of every verb refuses a number that makes no sense."""

import argparse

import pytest

from elastic_ckpt.cli import main

# Options for which 0 has a meaning. Which costs may be 0 is for the simulation to say.
ZERO = {"--cost", "--port", "--seed", "--shards", "--step"}


def test_number_that_makes_no_sense_is_refused():
    found, parser = set(), main.build_parser()
    (verbs,) = (each for each in parser._actions if each.dest == "verb")
    for action in (each for verb in verbs.choices.values() for each in verb._actions):
        if action.type is None:
            continue
        (*_, option), named = action.option_strings, "=" in str(action.metavar)
        found.add(option)
        for number in ["-1", "-0.5", "nan", "inf", "two", "", "0"]:
            if number != "0" or option not in ZERO:
                with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
                    action.type("a=" * named + number)
    assert found > ZERO | {"--days", "--max-bytes", "--slices", "--size"}
