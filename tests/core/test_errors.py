import itertools

import pytest

from elastic_ckpt.core import errors


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, ""), (1, "0"), (5, "0, 1, 2, 3, 4"), (6, "0, 1, 2, 3, 4, ...")],
)
def test_a_message_names_the_first_five(number, expected):
    assert errors.first_of(map(str, range(number))) == expected


def test_no_more_names_are_made_than_a_message_has():
    assert errors.first_of(map(str, itertools.count())).endswith("4, ...")
