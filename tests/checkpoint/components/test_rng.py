"""Keys are derived from names, shards and counts, never from host numbers."""

import itertools

import jax
import numpy as np

from elastic_ckpt.checkpoint.components import rng


def bits(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_keys_are_those_of_the_seed():
    assert bits(rng.Rng(3).key) == bits(jax.random.key(3))
    assert bits(rng.Rng(jax.random.key(3)).key) == bits(jax.random.key(3))


def test_no_two_keys_are_equal():
    keys = rng.Rng(1)
    made = [keys.key, *(keys.next() for _ in range(5))]
    for number, step in itertools.product(range(5), range(3)):
        made += [keys.for_shard(number, step), keys.for_name(str(number), step)]
    assert len(set(map(bits, made))) == len(made)


def test_the_count_is_a_part_of_the_state():
    keys = rng.Rng(1)
    keys.next()
    other = rng.Rng(5)
    other.put(keys.get())
    assert bits(other.next()) == bits(keys.next())


def test_derived_keys_do_not_change_with_the_count_and_may_be_traced():
    keys = rng.Rng(1)
    before = bits(keys.for_shard(7, 2))
    keys.next()
    assert bits(keys.for_shard(7, 2)) == before
    assert bits(jax.jit(keys.for_shard)(7, 2)) == before
