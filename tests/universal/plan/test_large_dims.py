"""Plans of large dims take no memory for each of their indices."""

import tracemalloc

import numpy as np
import pytest

from elastic_ckpt.core import boxes, errors
from elastic_ckpt.universal.moves import Move, Side, Source, TargetTensor
from elastic_ckpt.universal.plan import load_plan
from elastic_ckpt.universal.stored import Fragment, StoredTensor

DTYPE, SIZE = np.dtype(np.uint8), 2**40


@pytest.mark.slow
def test_a_gap_in_a_large_dim_is_refused_within_little_memory():
    box = boxes.whole((SIZE,))
    fragment = Fragment(box=box, file="x", offset=0, strides=(1,))
    stored = StoredTensor(name="w", dtype=DTYPE, shape=(SIZE,), fragments=(fragment,))
    place = Side(start=(0,), dims=(0,), steps=(1,))
    move = Move(
        target="w",
        sizes=(SIZE - 1,),
        sources=(Source(tensor=0, side=place),),
        target_side=place,
    )
    target = TargetTensor(name="w", dtype=DTYPE, shape=(SIZE,))
    tracemalloc.start()
    try:
        with pytest.raises(
            errors.CheckpointError, match="nothing fills 1 of its elements"
        ):
            load_plan.plan([stored], [move], [], {target: [box]})
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
