import base64
import io
import json

import cloudpickle
import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers as hf
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data.lm import tokenizers

TEXT = "the quick brown fox jumps over the lazy dog"
MERGES = [b"th", b"the", b" t", b"qu"]
NAMES = {
    "sentencepiece": "t.model",
    "tiktoken": "t.tiktoken",
    "huggingface": "tokenizer.json",
}


def sentencepiece_file(**options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT] * 20),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def ranks(merges):
    every = [bytes([byte]) for byte in range(256)] + merges
    return {token: rank for rank, token in enumerate(every)}


def tiktoken_file(merges=MERGES):
    return b"".join(
        base64.b64encode(token) + b" %d\n" % rank
        for token, rank in ranks(merges).items()
    )


def huggingface_file(special=("<s>", "</s>"), vocab_size=300):
    """A file that cuts and pads each text, as some do, which must have no effect."""
    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    return tokenizer.to_str().encode()


CONTENTS = {
    "sentencepiece": sentencepiece_file(),
    "tiktoken": tiktoken_file(),
    "huggingface": huggingface_file(),
}
OTHER_CONTENTS = {
    "sentencepiece": sentencepiece_file(model_type="char"),
    "tiktoken": tiktoken_file([*MERGES, b" the"]),
    "huggingface": huggingface_file(vocab_size=270),
}


def written(directory, kind, content=None):
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / NAMES[kind]
    file.write_bytes(CONTENTS[kind] if content is None else content)
    return str(file)


@pytest.mark.parametrize("kind", tokenizers.KINDS)
def test_tokens_are_int32_below_the_vocabulary_size_also_in_another_process(
    kind, tmp_path
):
    path = written(tmp_path, kind) if kind in NAMES else ""
    tokenizer = tokenizers.load(kind, path)
    texts = ["", TEXT, TEXT.encode(), "h\u00e9 \U0001f600\n", b"a\xff\xfeb"]
    expected = list(map(tokenizer.encode, texts))
    assert len(expected[0]) == 0
    for actual in expected:
        assert (actual.dtype, actual.ndim) == (np.int32, 1)
        assert ((actual >= 0) & (actual < tokenizer.vocab_size)).all()
    pickled = cloudpickle.dumps(tokenizer)
    assert len(pickled) < 1000
    tokenizers._open.cache_clear()
    loaded = cloudpickle.loads(pickled)
    np.testing.assert_equal(list(map(loaded.encode, texts)), expected)
    assert loaded.identity() == tokenizer.identity()


@pytest.mark.parametrize("kind", NAMES)
def test_a_tokenizer_is_the_content_of_its_file_and_not_the_path(kind, tmp_path):
    here = tokenizers.load(kind, written(tmp_path / "a", kind))
    there = tokenizers.load(kind, written(tmp_path / "b", kind))
    other = tokenizers.load(kind, written(tmp_path / "a", kind, OTHER_CONTENTS[kind]))
    assert here.identity() == there.identity() != other.identity()
    assert str(tmp_path) not in json.dumps(here.identity())
    assert here.vocab_size != other.vocab_size
    assert here.encode(TEXT).tolist() != other.encode(TEXT).tolist()
    # Another process, which has opened none of them.
    tokenizers._open.cache_clear()
    with pytest.raises(errors.DataError, match="same file on every host"):
        here.encode(TEXT)


def foreign_or_damaged():
    """Contents that are no tokenizers of a kind; a missing last line has no sign."""
    for kind in NAMES:
        others = [content for other, content in CONTENTS.items() if other != kind]
        for content in [*others, b"", b"{}", b"[]", b"\xff\xfe\x00", TEXT.encode()]:
            yield kind, content
    lines, in_json = CONTENTS["tiktoken"], CONTENTS["huggingface"]
    yield from (("huggingface", in_json[:n]) for n in range(0, len(in_json), 31))
    for content in (
        lines[: lines.rindex(b"\n", 0, -1) + 2],
        lines[:-2],
        lines.replace(b" 257\n", b" 999\n"),
        lines.replace(b" 257\n", b" 256\n"),
        lines.split(b"\n", 1)[1],
        b"dGhl 0\n",
    ):
        yield "tiktoken", content


def test_a_file_that_is_foreign_or_damaged_is_refused(tmp_path):
    for kind, content in foreign_or_damaged():
        path = written(tmp_path, kind, content)
        with pytest.raises(errors.DataError, match=f"{path} cannot be read as .*rest"):
            tokenizers.load(kind, path)


def test_llama3_splits_words_before_it_merges(tmp_path):
    merges = [b"12", b"34", b"1234", b"n't", b" a", b"a b"]
    path = written(tmp_path, "tiktoken", tiktoken_file(merges))
    tokenizer = tokenizers.load("tiktoken", path)
    assert (tokenizer.begin, tokenizer.end) == (262, 263)
    assert tokenizer.vocab_size == 262 + 256
    # Digits go by threes, and no token spans two words.
    assert tokenizer.encode("1234").tolist() == [256, ord("3"), ord("4")]
    assert tokenizer.encode("a b").tolist() == [ord("a"), ord(" "), ord("b")]


USUAL = ["<s>", "</s>", "A", "B"]
MAP, CONFIG = "special_tokens_map.json", "tokenizer_config.json"


@pytest.mark.parametrize(
    ("special", "beside", "expected"),
    [
        (["<unk>", "<s>", "</s>"], {}, (1, 2)),
        (["<|begin_of_text|>", "<|end_of_text|>"], {}, (0, 1)),
        (["<|endoftext|>"], {}, (None, 0)),
        (USUAL, {CONFIG: {"bos_token": {"content": "A"}, "eos_token": "B"}}, (2, 3)),
        (USUAL, {CONFIG: {"bos_token": None, "eos_token": "A"}}, (None, 2)),
        (USUAL, {MAP: {"bos_token": "A"}, CONFIG: {"eos_token": "B"}}, (2, 3)),
        (USUAL, {MAP: {"bos_token": "A"}, CONFIG: {"bos_token": "B"}}, (3, 1)),
    ],
)
def test_begin_and_end_are_told_by_the_files_beside_it_or_their_usual_names(
    tmp_path, special, beside, expected
):
    written(tmp_path, "huggingface", huggingface_file(special=special))
    for name, settings in beside.items():
        (tmp_path / name).write_text(json.dumps(settings))
    tokenizer = tokenizers.load("huggingface", str(tmp_path))
    assert (tokenizer.begin, tokenizer.end) == expected
    identity = tokenizer.identity()
    assert (identity["begin"], identity["end"]) == expected
    (tmp_path / CONFIG).write_text(json.dumps({"bos_token": "CC"}))
    tokenizers._open.cache_clear()
    with pytest.raises(errors.DataError, match=r"lacks 'CC', which .* as bos_token"):
        tokenizer.encode("a")


def one_by_one(kind, text):
    """The library's own tokens of a text alone."""
    if kind == "sentencepiece":
        model = sentencepiece.SentencePieceProcessor(model_proto=CONTENTS[kind])
        return model.encode(text)
    if kind == "huggingface":
        tokenizer = hf.Tokenizer.from_str(CONTENTS[kind].decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer.encode(text, add_special_tokens=False).ids
    pattern, merges = tokenizers.LLAMA3_PATTERN, ranks(MERGES)
    encoding = tiktoken.Encoding(
        "test", pat_str=pattern, mergeable_ranks=merges, special_tokens={}
    )
    return encoding.encode_ordinary(text)


@pytest.mark.parametrize("kind", NAMES)
@given(texts=st.lists(st.text("the quick\n1 \u00e9\U0001f600<s>", max_size=60)))
def test_texts_of_a_block_have_the_tokens_that_each_has_alone(
    tmp_path_factory, kind, texts
):
    tokenizer = tokenizers.load(kind, written(tmp_path_factory.getbasetemp(), kind))
    actual = [array.tolist() for array in tokenizer.encode_batch(texts)]
    assert actual == [one_by_one(kind, text) for text in texts]
