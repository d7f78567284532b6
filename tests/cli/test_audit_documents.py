"""`audit --find` and `--step` of a run that a loop of one's own has recorded."""

import json
import os

import jax
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.data import records
from elastic_ckpt.data.lm import language, token_blocks
from elastic_ckpt.data.sources import parquet
from tests import corpora, runs

FILE = "DOCUMENTS_OF_THE_RUN"
NAME = "tests.cli.test_audit_documents:data"


def make_shard(shard):
    read = records.Records(
        parquet.Parquet(files=(os.environ[FILE],), columns=("tokens",)),
        shard=shard,
        num_shards=4,
        read_options=records.ReadOptions(shuffle_seed=3),
    )
    tokens = token_blocks.Tokens(
        read, documents=language.Documents(column="tokens", tokenizer=None)
    )
    examples = language.Examples(tokens, length=8, truncate=False)
    return language.packed(examples, packing="concat_then_split", length=8, seed=0)


def data():
    return ec.data.sharded(make_shard, pipeline="packed")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that saved step 2 of 3, and continued to step 5; the tokens of its rows."""
    directory = tmp_path_factory.mktemp("documents")
    # Document n has the token n alone.
    documents = [{"tokens": np.full(2 + n % 5, n)} for n in range(1, 60)]
    file = corpora.write_parquet(directory / "a.parquet", documents, group_rows=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FILE, file)
        patch.syspath_prepend(str(runs.ROOT))
        inputs = {}
        for first, last in ((1, 3), (3, 5)):
            inputs |= train(directory, first, last, data())
        yield directory / "run", inputs


def train(directory, first, last, data):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    batches = ec.batches(data, mesh=mesh, global_batch_size=4)
    tiers = [ec.Persistent(directory / "saved", every=2)]
    inputs = {}
    with (
        ec.RunDirectory(directory / "run", tiers=tiers) as recorded,
        ec.Checkpointer(tiers) as checkpointer,
    ):
        if checkpointer.latest is not None:
            checkpointer.load_checkpointables(first - 1, {"data": batches})
        for step in range(first, last + 1):
            batch = next(batches)
            inputs[step] = np.asarray(batch["inputs"])
            recorded.log(step, batch, loss=1.0)
            checkpointer.save_checkpointables(step, {"data": batches})
    batches.close()
    return inputs


def test_documents_of_a_step(run):
    directory, inputs = run
    asked = ("audit", directory, "--data", NAME, "--step")
    for step in (1, 3, 5):
        answer = json.loads(answered(*asked, step, "--json"))
        (batch,) = answer["batches"]
        assert (batch["step"], batch["is_current"]) == (step, True)
        assert batch["attempts"] == [[1], [1], [1, 2], [2], [2]][step - 1]
        assert_named(batch, inputs[step])
        (reading,) = answer["readings"]
        assert reading["from_step"] == {1: None, 3: 2, 5: 4}[step]
    text = runs.verb(*asked, 3)
    assert text.startswith("step 3, attempt 1, 2: 4 rows from position 8\n")
    assert "  row 0: a.parquet:" in text
    assert "reading logical shards 0, 1, 2, 3 from the data state of checkpoint 2:" in (
        text
    )


def assert_named(batch, inputs):
    """Fails unless the documents of a batch are those of its tokens."""
    in_rows = {each["row"]: each["documents"] for each in batch["rows"]}
    for row, tokens in enumerate(inputs):
        documents = [(d["record"] + 1, d["num_tokens"]) for d in in_rows[row]]
        named = np.repeat(*np.transpose(documents))
        assert named.tolist() == tokens[tokens > 0].tolist()


def test_steps_of_a_document(run):
    directory, inputs = run
    asked = ("audit", directory, "--data", NAME, "--find")
    used = int(inputs[3][0][0])
    text = runs.verb(*asked, f"a.parquet:{used - 1}")
    (first, *uses) = [line for line in text.splitlines() if "reading" not in line]
    assert first.startswith(f"a.parquet:{used - 1}, epoch 0, logical shard")
    assert any("step 3, row 0, tokens " in line for line in uses)
    assert any(line.endswith("attempt 1 (discarded)") for line in uses)
    found = json.loads(answered(*asked, f"a.parquet:{used - 1}", "--json"))["found"]
    steps = {use["step"] for use in found[0]["uses"]}
    assert steps == {step for step, rows in inputs.items() if used in rows}
    assert found[-1]["outcome"] == "not_yet_used"


def answered(*arguments):
    """The JSON that a verb prints, without what it says on standard error."""
    output = runs.verb(*arguments)
    return output[: output.rindex("}") + 1]
