"""The reference model alone, and as a program over slices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from elastic_ckpt.core import topology
from elastic_ckpt.data import iterator, tokens
from elastic_ckpt.elastic import executables
from elastic_ckpt.training import model, schema
from tests.conftest import data_of

SIZES = schema.ModelSection(
    vocab_size=tokens.VOCAB_SIZE,
    base_num_decoder_layers=2,
    base_emb_dim=16,
    base_num_query_heads=2,
    head_dim=8,
    base_mlp_dim=32,
)
# Every row has one length, so that each function is compiled once.
LENGTH = 12


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: model.init_params(key, SIZES))(jax.random.key(0))


@jax.jit
def logits(params, batch):
    return model.logits(params, batch, head_dim=8, gather=lambda p: p)


@jax.jit
def loss(params, batch):
    return model.loss(params, batch, head_dim=8, gather=lambda p: p)


def row(*numbers):
    padded = np.zeros((1, LENGTH), np.int32)
    padded[0, : len(numbers)] = numbers
    return jnp.array(padded)


def words(seed, length):
    generator = np.random.default_rng(seed)
    return generator.integers(3, tokens.VOCAB_SIZE, length).tolist()


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
    # The segmentation tells padding, where token 0 is a word.
    segments, words_ = row(1, 1, 1), row(0, 7, 0, 9)
    batch = {"inputs": words_, "inputs_segmentation": segments, "targets": words_}
    batch |= {"inputs_position": row(*range(12)), "targets_segmentation": segments}
    assert loss(params, batch)[1] == 3


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
    # A token sees those before it, and none after.
    other = logits(params, batch | {"inputs": batch["inputs"].at[0, 2].set(5)})[0]
    np.testing.assert_array_equal(other[:2], packed[:2])
    assert not np.any(np.all(other[2:5] == packed[2:5], axis=1))
    np.testing.assert_array_equal(other[5:], packed[5:])


CONFIG = schema.Config(
    model=dataclasses.replace(SIZES, base_num_decoder_layers=1),
    optimizer=schema.OptimizerSection(learning_rate=0.02),
)
STEPS = 12


def train(data, slices):
    """A program, its first and last state, and the report of each step."""
    mesh = topology.mesh_of(topology.present(slices))
    program = model.build(CONFIG, mesh)
    batches = iterator.Batches(data, mesh=mesh, global_batch_size=16)
    state = program.init()
    first = jax.tree.map(np.asarray, state)
    reports = []
    for _ in range(STEPS):
        state, report = program.step(state, next(batches))
        reports.append(report)
    return program, first, state, reports


@pytest.fixture(scope="module")
def trained(corpus):
    return train(data_of(corpus), slices=2)


def test_loss_falls_and_the_state_stays_sharded_over_a_slice_alone(trained):
    program, _, state, reports = trained
    assert float(reports[-1].loss) < float(reports[0].loss) - 1
    assert state["step"] == STEPS
    for wanted, leaf in zip(
        jax.tree.leaves(program.abstract_state), jax.tree.leaves(state), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    qkv = state["params"]["qkv"]
    assert qkv.sharding.spec == PartitionSpec(None, None, "fsdp")
    assert len({str(shard.index) for shard in qkv.addressable_shards}) == 4


def test_evaluation_sums_over_targets_and_changes_nothing(trained, data):
    program, _, state, _ = trained
    mesh = topology.mesh_of(topology.present(2))
    batch = next(iterator.Batches(data, mesh=mesh, global_batch_size=16))
    loss, count = program.evaluate(state, batch)
    assert count == np.count_nonzero(batch["targets"])
    # A step donates its state, and other tests look at this one.
    _, report = program.step(jax.tree.map(jnp.copy, state), batch)
    # The same sums in another program.
    np.testing.assert_allclose(loss / count, report.loss, rtol=1e-5)
    assert state["step"] == STEPS


@pytest.mark.slow
def test_weights_are_equal_and_losses_agree_over_meshes(trained, data):
    losses = [[float(report.loss) for report in trained[-1]]]
    for slices in (1, 8):
        _, first, _, reports = train(data, slices)
        jax.tree.map(np.testing.assert_array_equal, trained[1], first)
        losses.append([float(report.loss) for report in reports])
    # float32 sums in another order: 1e-5 is some hundred roundings of them.
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-5)


@pytest.mark.slow
def test_slices_add_their_gradients_once_a_step(data, monkeypatch):
    # On CPUs, hosts keep no program with collectives in loops.
    monkeypatch.setattr(topology, "num_hosts", lambda: 8)
    deeper = dataclasses.replace(CONFIG.model, base_num_decoder_layers=3)
    config = dataclasses.replace(CONFIG, model=deeper)
    mesh = topology.mesh_of(topology.present(8))
    program = model.build(config, mesh, microbatches=2)
    batch = next(iterator.Batches(data, mesh=mesh, global_batch_size=16))
    compiled = program.step.lower(program.abstract_state, batch).compile()
    assert "while" in compiled.as_text()
    assert not executables.loses_order(compiled)
