import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import boxes, digest, errors
from elastic_ckpt.steps import manifest, read_plan, search
from tests.tiers import saved_worlds


def shards(whole, readers, parts):
    """The boxes of a new grid, dealt to the readers in turn."""
    wanted = []
    for leaf in whole.leaves:
        cut = [min(parts, dim) for dim in leaf.shape]
        for turn, box in enumerate(saved_worlds.grid(leaf.shape, cut)):
            wanted.append((turn % readers, leaf.path, box))
    return wanted


def fetched(read, choice=0):
    """The values that a choice of a read gives, compared with its digest."""
    _, fragment = read.choices[choice]
    whole = read_whole[read.path]
    saved = whole[tuple(map(slice, fragment.box.start, fragment.box.stop))]
    assert digest.values_digest(saved) == fragment.digest
    return saved[read.out_of]


read_whole: dict[str, np.ndarray] = {}


def check(plan, wanted, whole):
    """Every element of what is wanted is in one piece, and from any holder right."""
    read_whole.clear()
    read_whole.update(
        {leaf.path: saved_worlds.values(leaf.path, leaf.shape) for leaf in whole.leaves}
    )
    made = [np.full(box.shape, np.nan, np.float32) for _, _, box in wanted]
    for number in range(len(plan)):
        read = plan.read(number)
        into = made[plan.of_wanted[number]]
        assert np.isnan(into[read.into]).all()
        for choice in range(len(read.choices)):
            into[read.into] = fetched(read, choice)
    for (_, path, box), read_values in zip(wanted, made, strict=True):
        at = tuple(map(slice, box.start, box.stop))
        assert np.array_equal(read_values, read_whole[path][at])


@given(saved_worlds.saved(), st.integers(1, 5), st.integers(1, 7))
def test_pieces_tile_every_wanted_box_exactly_once(offers, readers, parts):
    whole = offers[0].manifest.contents
    wanted = shards(whole, readers, parts)
    plan = read_plan.plan(
        search.Step.from_offers(offers),
        [saved_worlds.host(number) for number in range(readers)],
        read_plan.Wanted.from_boxes(wanted, contents=whole),
    )
    check(plan, wanted, whole)


@given(st.data())
def test_pieces_tile_also_where_saved_boxes_overlap(data):
    first = data.draw(saved_worlds.saved(most_hosts=3))
    whole = first[0].manifest.contents
    more = [
        (number, box)
        for number, leaf in enumerate(whole.leaves)
        for box in saved_worlds.grid(
            leaf.shape, [data.draw(st.integers(1, dim)) for dim in leaf.shape]
        )
    ]
    another = saved_worlds.offer(saved_worlds.host(9), whole, more, tier="persistent")
    wanted = shards(whole, 2, data.draw(st.integers(1, 5)))
    plan = read_plan.plan(
        search.Step.from_offers([*first, another]),
        [saved_worlds.host(0), saved_worlds.host(1)],
        read_plan.Wanted.from_boxes(wanted, contents=whole),
    )
    check(plan, wanted, whole)


@given(saved_worlds.saved(), st.integers(1, 4))
def test_what_a_reader_is_told_does_not_depend_on_the_others(offers, readers):
    whole = offers[0].manifest.contents
    step = search.Step.from_offers(offers)
    hosts = [saved_worlds.host(number) for number in range(readers)]
    wanted = shards(whole, readers, 3)

    def reads_of(plan):
        return [
            (read.path, read.piece, [offer.host.id for offer, _ in read.choices])
            for read in map(plan.read, range(len(plan)))
        ]

    together = read_plan.plan(
        step, hosts, read_plan.Wanted.from_boxes(wanted, contents=whole)
    )
    alone = []
    for reader, host in enumerate(hosts):
        own = [(0, path, box) for who, path, box in wanted if who == reader]
        plan = read_plan.plan(
            step, [host], read_plan.Wanted.from_boxes(own, contents=whole)
        )
        alone += reads_of(plan)
    assert sorted(reads_of(together)) == sorted(alone)


WHOLE = saved_worlds.contents({"w": [64]}, rng=1)
EVERY = [(0, part) for part in saved_worlds.grid([64], [64])]
RNG = manifest.ComponentFile(
    component="rng", parts=(0, 1), path="rng.bin", digest=bytes(16), stored_bytes=8
)


def in_slice(name, number, **options):
    host = dataclasses.replace(saved_worlds.host(number), domains={"slice": name})
    return saved_worlds.offer(host, WHOLE, EVERY, files=[RNG], **options)


OFFERS = [
    in_slice("far", 0),
    in_slice("near", 1),
    in_slice("near", 2),
    in_slice("far", 3),
    in_slice("near", 4, tier="persistent"),
]


def wanted_whole(reader=0):
    return read_plan.Wanted.from_boxes(
        [(reader, "w", boxes.whole([64]))], contents=WHOLE
    )


def test_the_nearest_copy_is_read_and_the_others_are_next():
    reader = OFFERS[2].host
    plan = read_plan.plan(search.Step.from_offers(OFFERS), [reader], wanted_whole())
    orders = set()
    for number in range(len(plan)):
        order = [offer.host.number for offer, _ in plan.read(number).choices]
        assert order[:2] + order[-1:] == [2, 1, 4]
        orders.add(tuple(order))
    assert len(orders) == 2
    (file,) = read_plan.files(search.Step.from_offers(OFFERS), reader, "rng")
    numbers = [offer.host.number for offer in file[1]]
    assert (file[0], numbers[:2] + numbers[-1:]) == (RNG, [2, 1, 4])


def test_where_saved_boxes_overlap_the_nearest_and_then_the_largest_are_read():
    def cut(number, parts, **options):
        held = [(0, part) for part in saved_worlds.grid([64], [parts])]
        host = saved_worlds.host(number)
        return saved_worlds.offer(host, WHOLE, held, files=[RNG], **options)

    own = saved_worlds.offer(
        saved_worlds.host(0), WHOLE, [(0, boxes.Box(start=(3,), stop=(9,)))]
    )
    step = search.Step.from_offers(
        [own, cut(1, 8), cut(2, 2), cut(3, 1, tier="persistent")]
    )
    plan = read_plan.plan(step, [own.host], wanted_whole())
    reads = [plan.read(number) for number in range(len(plan))]
    assert sorted(
        (read.piece.start[0], read.piece.stop[0], read.choices[0][0].host.number)
        for read in reads
    ) == [(0, 3, 2), (3, 9, 0), (9, 32, 2), (32, 64, 2)]


def test_a_step_with_a_gap_is_not_planned():
    lone = saved_worlds.offer(saved_worlds.host(0), WHOLE, EVERY[:-1], files=[RNG])
    with pytest.raises(errors.CheckpointError, match=r"w\[63:64\].*complete step"):
        read_plan.plan(search.Step.from_offers([lone]), [lone.host], wanted_whole())


def test_what_was_not_saved_cannot_be_wanted():
    with pytest.raises(errors.CheckpointError, match=r"no leaf 'v'; it has \['w'\]"):
        read_plan.Wanted.from_boxes([(0, "v", boxes.whole([64]))], contents=WHOLE)
    for shape in ([65], [8, 8]):
        with pytest.raises(errors.CheckpointError, match=r"saved, w\[0:64\]; restore"):
            read_plan.Wanted.from_boxes([(0, "w", boxes.whole(shape))], contents=WHOLE)
