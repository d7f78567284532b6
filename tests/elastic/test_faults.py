from elastic_ckpt.elastic import faults
from elastic_ckpt.elastic.faults import Fault, Kind

TWO = '[{"return_slice": 1, "at_step": 8}, {"kill_slice": 1, "at_step": 4}]'


def test_faults_are_read_in_the_order_of_their_steps():
    killed = Fault(kind=Kind.KILL_SLICE, target=1, at_step=4)
    returned = Fault(kind=Kind.RETURN_SLICE, target=1, at_step=8)
    assert faults.parse(TWO) == (killed, returned)
    assert faults.parse("") == ()


def test_faults_are_due_when_their_step_is_done():
    listed = faults.parse(TWO)
    assert [len(faults.due(listed, step)) for step in (0, 3, 4, 7, 8, 9)] == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]
