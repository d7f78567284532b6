import dataclasses
import json
import threading

import grain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.data.lm import language, token_blocks, tokenizers
from tests import pipelines

# More than two blocks; one is long enough to end a block alone, and some are empty.
TEXTS = [
    None if n == 5 else "" if n == 9 else f"{n} " * (20_000 if n == 20 else n % 7 + 1)
    for n in range(45)
]
EXPECTED = [
    [] if text is None else [2, *tokenizers.Bytes().encode(text).tolist(), 1]
    for text in TEXTS
]


@dataclasses.dataclass(frozen=True)
class InThreads:
    """The byte-level tokens, made by threads; counts the texts and the threads."""

    texts: list = dataclasses.field(default_factory=list)
    threads: set = dataclasses.field(default_factory=set)
    begin, end, is_parallel = 2, 1, True

    def encode_batch(self, texts):
        self.texts.extend(texts)
        self.threads.add(threading.current_thread())
        return tokenizers.Bytes().encode_batch(texts)


@pytest.fixture(autouse=True)
def own_threads(monkeypatch):
    """Threads of the test's own, which end with it."""
    pools = {}
    monkeypatch.setattr(token_blocks, "_pools", pools)
    yield pools
    for pool in pools.values():
        pool.shutdown()


def source(texts):
    def record(number):
        return {"text": texts[number]}

    numbers = grain.MapDataset.range(len(texts)).map(record)
    return numbers.to_iter_dataset(pipelines.IN_CALLER)


def tokens(texts=None, *, num_threads=0, tokenizer=None, parent=None):
    return token_blocks.Tokens(
        parent or source(TEXTS if texts is None else texts),
        documents=language.Documents(tokenizer=tokenizer or InThreads()),
        num_threads=num_threads,
    )


def lists(actual):
    return [array.tolist() for array in actual]


@pytest.mark.parametrize("num_threads", [0, 3])
def test_the_state_before_every_document_can_be_returned_to(num_threads):
    elements, states = iter(tokens(num_threads=num_threads)), []
    for expected in EXPECTED:
        states.append(json.dumps(elements.get_state()))
        assert next(elements).tolist() == expected
    states.append(json.dumps(elements.get_state()))
    assert list(elements) == list(elements) == []
    for number, saved in reversed(list(enumerate(states))):
        for resumed in (elements, iter(tokens(num_threads=num_threads))):
            resumed.set_state(json.loads(saved))
            assert json.dumps(resumed.get_state()) == saved
            assert lists(resumed) == EXPECTED[number:]


@settings(max_examples=15)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 50, 5_000, 40_000]), max_size=50),
    stops=st.lists(st.integers(0, 20), max_size=4),
    data=st.data(),
)
def test_neither_threads_nor_stops_change_tokens_or_states(sizes, stops, data):
    texts = [chr(97 + n % 26) * size for n, size in enumerate(sizes)]
    one, saved = iter(tokens(texts)), None
    for stop in [*stops, len(texts)]:
        resumed = iter(tokens(texts, num_threads=data.draw(st.integers(0, 3))))
        if saved:
            resumed.set_state(saved)
        for _ in range(stop):
            expected = next(one, None)
            actual = next(resumed, None)
            assert (actual is None) == (expected is None)
            if actual is not None:
                assert actual.tolist() == expected.tolist()
        saved = json.loads(json.dumps(resumed.get_state()))
        assert saved == one.get_state()


def test_a_resume_does_not_tokenise_what_was_taken():
    elements = iter(tokens())
    for _ in range(13):
        next(elements)
    tokenizer = InThreads()
    resumed = iter(tokens(tokenizer=tokenizer))
    resumed.set_state(elements.get_state())
    assert next(resumed).tolist() == EXPECTED[13]
    assert tokenizer.texts == TEXTS[13:16]


class FailsAt:
    """Passes records on, but fails at the given one: at first, or always."""

    def __init__(self, number, *, once):
        self.left = 1 if once else 1_000_000
        self.number = number

    def __call__(self, record):
        if record["text"] == TEXTS[self.number] and self.left:
            self.left -= 1
            raise ValueError("cannot be read")
        return record


@pytest.mark.parametrize(("number", "num_threads"), [(3, 0), (16, 2), (44, 2)])
def test_an_error_is_raised_when_its_document_is_due(number, num_threads):
    failing = source(TEXTS).map(FailsAt(number, once=False))
    elements = iter(tokens(parent=failing, num_threads=num_threads))
    for expected in EXPECTED[:number]:
        assert next(elements).tolist() == expected
    state = elements.get_state()
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be read"):
            next(elements)
        assert elements.get_state() == state
    resumed = iter(tokens(num_threads=num_threads))
    resumed.set_state(state)
    assert lists(resumed) == EXPECTED[number:]


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_error_of_the_tokenizer_loses_no_document(num_threads):
    class Failing(InThreads):
        def encode_batch(self, texts):
            if len(self.texts) == 0 and TEXTS[17] in texts:
                self.texts.append("failed")
                raise ValueError("cannot be tokenised")
            return tokenizers.Bytes().encode_batch(texts)

    elements = iter(tokens(tokenizer=Failing(), num_threads=num_threads))
    actual, failed = [], False
    while not failed:
        state = elements.get_state()
        try:
            actual.append(next(elements).tolist())
        except ValueError:
            failed = True
    assert actual == EXPECTED[: len(actual)]
    resumed = iter(tokens())
    resumed.set_state(state)
    assert actual + lists(resumed) == EXPECTED
