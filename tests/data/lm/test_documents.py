import dataclasses
import json
import threading

import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.data import shard_steps
from elastic_ckpt.data.lm import documents, tokenizers
from tests import corpora
from tests.data.lm.test_rows import source

TEXTS = [
    None if n == 5 else "" if n == 9 else f"{n} " * (20_000 if n == 20 else n % 7 + 1)
    for n in range(45)
]
EXPECTED = [
    [] if text is None else [2, *tokenizers.Bytes().encode(text).tolist(), 1]
    for text in TEXTS
]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [2, 100, 101, 1]),
        ({"add_begin": False}, [100, 101, 1]),
        ({"add_end": False}, [2, 100, 101]),
        ({"add_begin": False, "add_end": False}, [100, 101]),
    ],
)
def test_a_text_begins_and_ends_with_its_tokens_unless_told_otherwise(
    settings, expected
):
    made = documents.Documents(**settings)
    for text in ("ab", b"ab"):
        (actual,) = made.tokens([made.value({"text": text})])
        assert (actual.dtype, actual.tolist()) == (np.int32, expected)


@dataclasses.dataclass(frozen=True)
class InThreads:
    """The byte-level tokens; keeps the threads that make them, and fails at a text."""

    failing: str | None = None
    threads: set = dataclasses.field(default_factory=set)
    begin, end, is_parallel = 2, 1, True

    def encode_batch(self, texts):
        if self.failing in texts:
            raise ValueError("cannot be tokenised")
        self.threads.add(threading.current_thread())
        return tokenizers.Bytes().encode_batch(texts)


@pytest.fixture(autouse=True)
def own_threads(monkeypatch):
    """Threads of the test's own, which end with it."""
    pools = {}
    monkeypatch.setattr(documents, "_pools", pools)
    yield
    for pool in pools.values():
        pool.shutdown()


def tokens(num_threads, tokenizer):
    return documents.Tokens(
        source({"text": text} for text in TEXTS),
        documents=documents.Documents(tokenizer=tokenizer),
        num_threads=num_threads,
    )


@pytest.mark.parametrize("num_threads", [0, 3])
@pytest.mark.parametrize("at_a_time", [1, 7, 45])
def test_neither_threads_nor_how_many_are_taken_change_tokens(num_threads, at_a_time):
    tokenizer = InThreads()
    made = iter(tokens(num_threads, tokenizer))
    found = []
    while some := shard_steps.take(made, at_a_time):
        found += [each.tolist() for each in some]
        made.set_state(json.loads(json.dumps(made.get_state())))
    assert found == EXPECTED
    is_main = {threading.current_thread()} == tokenizer.threads
    assert is_main == (num_threads == 0 or at_a_time <= 8)


@pytest.mark.parametrize("num_threads", [0, 3])
def test_an_error_of_the_tokenizer_reaches_the_caller(num_threads):
    made = iter(tokens(num_threads, InThreads(TEXTS[17])))
    assert len(shard_steps.take(made, 16)) == 16
    with pytest.raises(ValueError, match="cannot be tokenised"):
        shard_steps.take(made, 20)


def test_a_document_keeps_no_block_in_memory(tmp_path):
    file = corpora.write_parquet(tmp_path / "a", corpora.documents(0, 20))
    records = ec.data.Records(ec.data.Parquet(files=[file]), shard=0, num_shards=1)
    of_column = documents.Documents(column="tokens", tokenizer=None)
    made = iter(documents.Tokens(records, documents=of_column))
    assert next(made).base is None
