import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from elastic_ckpt.core import digest, topology
from elastic_ckpt.data import example_id, iterator, rows, tokens
from elastic_ckpt.elastic import executables
from elastic_ckpt.training import configured, schema
from tests.conftest import data_of

CONFIG = schema.Config(
    model=schema.ModelSection(
        vocab_size=tokens.VOCAB_SIZE,
        base_emb_dim=16,
        base_num_query_heads=2,
        head_dim=8,
        base_mlp_dim=32,
        base_num_decoder_layers=1,
    ),
    optimizer=schema.OptimizerSection(learning_rate=0.02),
)
STEPS = 12


def train(data, slices):
    """A program, its first and last state, and the report of each step."""
    mesh = topology.mesh_of(topology.present(slices))
    program = configured.program(CONFIG, mesh)
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


def test_loss_falls(trained):
    losses = [float(report.loss) for report in trained[-1]]
    assert losses[-1] < losses[0] - 1


def test_report_names_the_rows_that_were_trained_on(trained, data):
    host = data.host_batches(
        rows.Placement.in_order(0, num_hosts=1, global_batch_size=16)
    )
    for report in trained[-1]:
        batch = next(host)
        assert example_id.join(np.asarray(report.example_id)) == (
            example_id.join(batch["example_id"])
        )
        row = np.concatenate([batch["inputs"], batch["targets"]], axis=1)
        np.testing.assert_array_equal(report.row_digests, digest.row_digests(row))


def test_state_keeps_its_shapes_and_shardings(trained):
    program, _, state, _ = trained
    assert state["step"] == STEPS
    for wanted, leaf in zip(
        jax.tree.leaves(program.abstract_state), jax.tree.leaves(state), strict=True
    ):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


def test_parameters_are_sharded_over_a_slice_and_repeated_over_slices(trained):
    qkv = trained[2]["params"]["qkv"]
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
    model = dataclasses.replace(CONFIG.model, base_num_decoder_layers=3)
    config = dataclasses.replace(CONFIG, model=model)
    mesh = topology.mesh_of(topology.present(8))
    program = configured.program(config, mesh, microbatches=2)
    batch = next(iterator.Batches(data, mesh=mesh, global_batch_size=16))
    compiled = program.step.lower(program.abstract_state, batch).compile()
    assert "while" in compiled.as_text()
    assert not executables.loses_order(compiled)
