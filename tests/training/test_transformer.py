import jax
import jax.numpy as jnp
import numpy as np

from elastic_ckpt.config import schema
from elastic_ckpt.data import tokens
from elastic_ckpt.training import transformer

MODEL = schema.ModelSection(
    base_emb_dim=16,
    base_num_query_heads=2,
    head_dim=8,
    base_mlp_dim=32,
    base_num_decoder_layers=2,
)
PARAMS = transformer.init(jax.random.key(0), MODEL)


def logits(inputs):
    return transformer.logits(PARAMS, inputs, head_dim=8, gather=lambda params: params)


def loss(inputs, targets):
    return transformer.loss(
        PARAMS, inputs, targets, head_dim=8, gather=lambda params: params
    )


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
