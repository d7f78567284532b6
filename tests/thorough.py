"""Long tests of which `.ci/run` takes some cases, evenly chosen, and a release all."""

import pytest

MARK = pytest.mark.thorough


def but(cases, count):
    """The cases, as parameters; all but `count` of them are marked as thorough."""
    chosen = {number * len(cases) // count for number in range(count)}
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if number in chosen else MARK,
        )
        for number, case in enumerate(cases)
    ]
