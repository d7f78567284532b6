"""Worlds of processes that are prepared before it is known that they are needed."""

import pytest

from elastic_ckpt.elastic import host_start, process_world, watch
from elastic_ckpt.elastic.cluster import Assignment, CompileAhead
from elastic_ckpt.elastic.decision import Train
from elastic_ckpt.tiers.persistent import claims


def work(*slices, spares=()):
    return Train(slices=slices, spares=spares, rows=8, accumulated=1)


@pytest.mark.parametrize(
    ("assignment", "is_for"),
    [
        (Assignment(number=2, work=work(0, 1)), True),
        (Assignment(number=2, work=work(0, 1, spares=(2,))), True),
        (
            Assignment(number=2, work=work(0, 1), claimant=claims.new_claimant()),
            True,
        ),
        (
            Assignment(
                number=2,
                work=work(0, 1),
                compile_ahead=CompileAhead(compiles=print, work=work(0)),
            ),
            True,
        ),
        (Assignment(number=3, work=work(0, 1)), False),
        (Assignment(number=2, work=work(0, 2)), False),
    ],
)
def test_a_prepared_world_is_taken_if_its_hosts_are_those(tmp_path, assignment, is_for):
    prepared = process_world.ProcessWorld(
        print,
        Assignment(number=2, work=work(0, 1)),
        log_directory=tmp_path,
        limits=watch.unlimited(),
        machines=[host_start.ThisMachine()] * 2,
    )
    assert prepared.is_for(assignment) == is_for
