"""Texts, and tokenizers trained on them, that the benchmark of text reads.

The texts are the sources of Python's standard library, cut to a log-normal number of
characters, so that nothing has to be downloaded. There is a tokenizer of each library,
and what its own batch call makes of a list of texts.
"""

from __future__ import annotations

import base64
import io
import os
import pathlib
from collections.abc import Callable

import numpy as np

from elastic_ckpt.data.lm import text, tokenizers

COLUMN = "text"

_NUM_FILES = 8
_MEAN_CHARACTERS = 2000
# The standard deviation of the logarithm of the length.
_SIGMA = 0.8
_TRAINING_TEXTS = 2500
_VOCAB_SIZE = 32_000
_SENTENCEPIECE_VOCAB_SIZE = 8_000
_SPECIAL = ("<s>", "</s>")


def texts(directory: pathlib.Path, num_characters: int | None = None) -> list[str]:
    """The texts, of so many characters together; None takes all, some 31 million."""
    from pyarrow import parquet as pq

    sources = directory / "sources.parquet"
    text.write(text.PYTHON_STDLIB, str(sources), file_type="parquet")
    column = pq.read_table(sources)["text"].to_pylist()
    sources.unlink()
    whole = "\n".join(column)[:num_characters]
    generator = np.random.default_rng(0)
    mu, place = np.log(_MEAN_CHARACTERS) - _SIGMA**2 / 2, 0
    texts_of_files = []
    while place < len(whole):
        length = max(1, int(generator.lognormal(mu, _SIGMA)))
        texts_of_files.append(whole[place : place + length])
        place += length
    return texts_of_files


def write(texts: list[str], directory: pathlib.Path) -> list[str]:
    """Writes Parquet files of the texts; their paths."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    files = []
    for file in range(_NUM_FILES):
        files.append(str(directory / f"texts-{file}.parquet"))
        table = pa.table({COLUMN: texts[file::_NUM_FILES]})
        pq.write_table(table, files[-1], row_group_size=100)
    return files


def train(texts: list[str], directory: pathlib.Path) -> dict[str, str]:
    """Trains a tokenizer of each kind; the paths of their files."""
    import tokenizers as hf

    trained = texts[:_TRAINING_TEXTS]
    byte_level = hf.pre_tokenizers.ByteLevel
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    trainer = hf.trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=list(_SPECIAL),
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(trained, trainer)
    contents = {
        "huggingface": tokenizer.to_str().encode(),
        "tiktoken": _ranks(tokenizer.get_vocab()),
        "sentencepiece": _pieces(trained),
    }
    paths = {}
    for kind, content in contents.items():
        # The name that Hugging Face's has to have does for all.
        path = directory / kind / "tokenizer.json"
        path.parent.mkdir()
        path.write_bytes(content)
        paths[kind] = str(path)
    return paths


def _ranks(vocab: dict[str, int]) -> bytes:
    # A byte-level vocabulary as tiktoken's: single bytes first, then in order.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    bytes_of = {chr(byte): byte for byte in plain}
    bytes_of |= {chr(256 + place): byte for place, byte in enumerate(others)}
    tokens = [
        bytes(bytes_of[character] for character in token)
        for token in sorted(vocab, key=vocab.__getitem__)
        if token not in _SPECIAL and len(token) > 1
    ]
    ranked = [*(bytes([byte]) for byte in range(256)), *tokens]
    lines = (
        base64.b64encode(token) + f" {rank}\n".encode()
        for rank, token in enumerate(ranked)
    )
    return b"".join(lines)


def _pieces(trained: list[str]) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(trained),
        model_writer=model,
        model_type="bpe",
        vocab_size=_SENTENCEPIECE_VOCAB_SIZE,
        hard_vocab_limit=False,
        max_sentence_length=100_000,
        minloglevel=2,
    )
    return model.getvalue()


def _count_huggingface(path: str) -> Callable[[list[str]], int]:
    import tokenizers as hf

    tokenizer = hf.Tokenizer.from_file(path)

    def count(texts: list[str]) -> int:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return sum(map(len, encoded))

    return count


def _count_tiktoken(path: str) -> Callable[[list[str]], int]:
    import tiktoken
    from tiktoken import load

    encoding = tiktoken.Encoding(
        name="llama3",
        pat_str=tokenizers.LLAMA3_PATTERN,
        mergeable_ranks=load.load_tiktoken_bpe(path),
        special_tokens={},
    )

    def count(texts: list[str]) -> int:
        threads = os.cpu_count() or 1
        encoded = encoding.encode_ordinary_batch(texts, num_threads=threads)
        return sum(map(len, encoded))

    return count


def _count_sentencepiece(path: str) -> Callable[[list[str]], int]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=path)

    def count(texts: list[str]) -> int:
        return sum(map(len, model.encode(texts, num_threads=os.cpu_count() or 1)))

    return count


# Tokens of a list of texts by the library's own batch call, on every core.
COUNTERS: dict[str, Callable[[str], Callable[[list[str]], int]]] = {
    "huggingface": _count_huggingface,
    "tiktoken": _count_tiktoken,
    "sentencepiece": _count_sentencepiece,
}
