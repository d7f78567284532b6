import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_ckpt.data import tokens
from elastic_ckpt.training import transformer

SIZES = transformer.Sizes(
    vocab=tokens.VOCAB_SIZE, layers=2, emb=16, heads=2, head_dim=8, mlp=32
)
# Every row has one length, so that each function is compiled once.
LENGTH = 12


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: transformer.init(key, SIZES))(jax.random.key(0))


@jax.jit
def logits(params, batch):
    return transformer.logits(params, batch, head_dim=8, gather=lambda p: p)


@jax.jit
def loss(params, batch):
    return transformer.loss(params, batch, head_dim=8, gather=lambda p: p)


def row(*numbers):
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(numbers)] = numbers
    return jnp.array(padded)


def words(seed, length=LENGTH):
    generator = np.random.default_rng(seed)
    return generator.integers(3, tokens.VOCAB_SIZE, length).tolist()


def test_token_sees_those_before_it_and_none_after(params):
    inputs = row(*words(1))
    before = logits(params, {"inputs": inputs})
    after = logits(params, {"inputs": inputs.at[0, 7].set(5)})
    np.testing.assert_array_equal(before[0, :7], after[0, :7])
    assert not np.allclose(before[0, 7:], after[0, 7:])


def test_layers_that_say_nothing_leave_each_token_as_it_is(params):
    silent = {
        name: jnp.zeros_like(leaf) if name in ("attention_out", "mlp_out") else leaf
        for name, leaf in params.items()
    }
    embedded = np.asarray(params["embedding"])[words(1)]
    scale = np.sqrt((embedded**2).mean(axis=1, keepdims=True) + 1e-6)
    expected = embedded / scale @ np.asarray(params["embedding"]).T
    found = logits(silent, {"inputs": row(*words(1))})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3)


def test_loss_is_the_negative_log_likelihood_of_all_targets_but_padding(params):
    inputs, targets = row(2, 70, 71, 72), row(70, 71, 72, 1)
    summed, count = loss(params, {"inputs": inputs, "targets": targets})
    assert count == 4
    found = np.asarray(logits(params, {"inputs": inputs})[0, :4], np.float64)
    of_targets = found[range(4), np.asarray(targets[0, :4])]
    expected = (np.log(np.exp(found).sum(axis=1)) - of_targets).sum()
    np.testing.assert_allclose(summed, expected, rtol=1e-5)
    # A fresh model knows nothing: its logits deviate by about a quarter.
    assert abs(summed / count - np.log(tokens.VOCAB_SIZE)) < 0.3


def test_example_of_a_packed_row_is_as_if_it_were_alone(params):
    first, second = words(1, 5), words(2, 4)
    batch = {
        "inputs": row(*first, *second),
        "inputs_segmentation": row(*[1] * 5, *[2] * 4),
        "inputs_position": row(*range(5), *range(4)),
    }
    packed = logits(params, batch)[0]
    for part, alone in ((packed[:5], first), (packed[5:9], second)):
        expected = logits(params, {"inputs": row(*alone)})[0, : len(alone)]
        # The same sums in another order.
        np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-5)


def test_segmentation_tells_padding_also_where_token_0_is_a_word(params):
    segments = row(1, 1, 1)
    batch = {
        "inputs": row(0, 7, 0, 9),
        "targets": row(0, 7, 0, 9),
        "inputs_segmentation": segments,
        "inputs_position": row(*range(LENGTH)),
        "targets_segmentation": segments,
    }
    _, count = loss(params, batch)
    assert count == 3
