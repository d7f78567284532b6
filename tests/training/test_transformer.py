import jax
import jax.numpy as jnp
import numpy as np

from elastic_ckpt.data import tokens
from elastic_ckpt.training import transformer

SIZES = transformer.Sizes(
    vocab=tokens.VOCAB_SIZE, layers=2, emb=16, heads=2, head_dim=8, mlp=32
)
PARAMS = transformer.init(jax.random.key(0), SIZES)


def logits(inputs, **packing):
    batch = {"inputs": inputs, **packing}
    return transformer.logits(PARAMS, batch, head_dim=8, gather=lambda params: params)


def loss(inputs, targets, **packing):
    batch = {"inputs": inputs, "targets": targets, **packing}
    summed, count = transformer.loss(
        PARAMS, batch, head_dim=8, gather=lambda params: params
    )
    return summed / count


def test_a_token_sees_those_before_it_and_none_after():
    inputs = jax.random.randint(jax.random.key(1), (1, 12), 3, tokens.VOCAB_SIZE)
    changed = inputs.at[0, 7].set(5)
    before, after = logits(inputs), logits(changed)
    np.testing.assert_array_equal(before[0, :7], after[0, :7])
    assert not np.allclose(before[0, 7:], after[0, 7:])


def test_an_untrained_model_knows_nothing():
    inputs = jax.random.randint(jax.random.key(1), (4, 12), 3, tokens.VOCAB_SIZE)
    uniform = np.log(tokens.VOCAB_SIZE)
    # Logits of a fresh model have a standard deviation of about a quarter.
    assert abs(loss(inputs, inputs) - uniform) < 0.3


def test_padding_does_not_count():
    inputs = jnp.array([[2, 70, 71, 72, 0, 0]])
    targets = jnp.array([[70, 71, 72, 1, 0, 0]])
    # The same four targets, in a row without padding; causal, so the rest is unseen.
    np.testing.assert_allclose(
        loss(inputs, targets), loss(inputs[:, :4], targets[:, :4]), rtol=1e-6
    )


def test_an_example_of_a_packed_row_is_as_if_it_were_alone():
    first = jax.random.randint(jax.random.key(1), (1, 5), 3, tokens.VOCAB_SIZE)
    second = jax.random.randint(jax.random.key(2), (1, 4), 3, tokens.VOCAB_SIZE)
    packing = {
        "inputs_segmentation": jnp.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 0]]),
        "inputs_position": jnp.array([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0]]),
    }
    row = jnp.concatenate([first, second, jnp.zeros((1, 1), int)], axis=1)
    packed = logits(row, **packing)
    # The same sums in another order.
    np.testing.assert_allclose(packed[:, :5], logits(first), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(packed[:, 5:9], logits(second), rtol=1e-5, atol=1e-5)


def test_the_segmentation_tells_padding_also_where_token_0_is_a_word():
    inputs = targets = jnp.array([[0, 7, 0, 9]])
    segments = jnp.array([[1, 1, 1, 0]])
    packing = {
        "inputs_segmentation": segments,
        "inputs_position": jnp.arange(4)[None],
        "targets_segmentation": segments,
    }
    _, count = transformer.loss(
        PARAMS,
        {"inputs": inputs, "targets": targets, **packing},
        head_dim=8,
        gather=lambda params: params,
    )
    assert count == 3
