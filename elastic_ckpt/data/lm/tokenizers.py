"""Tokenizers, which convert text to tokens and identify the settings that matter.

Each line of a `.tiktoken` file contains a base64 token and its rank. The file is used
as in Llama 3 and MaxText: with their pattern, and with 256 special tokens after the
last rank.

The text of a special token in a document remains plain text, except with a
`tokenizer.json`, where it becomes the special token, as in `transformers`.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from etils import epath

from elastic_ckpt.core import digest as digests
from elastic_ckpt.core import errors, extras, storage
from elastic_ckpt.data import tokens

_BYTES = "bytes"
_FILES = {
    "sentencepiece": "a SentencePiece .model file",
    "tiktoken": "a .tiktoken file of base64 tokens and their ranks",
    "huggingface": "a downloaded tokenizer.json file, or a directory that contains one",
}
KINDS = (_BYTES, *_FILES)

# The pattern of Llama 3; `begin` and `end` are the first two of its special tokens.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NUM_SPECIAL = 256
# tiktoken fails on much longer strings; Llama 3 and MaxText also split them here.
_MAX_CHARACTERS = 400_000

# The usual special tokens, if no file next to a tokenizer.json lists them.
_USUAL = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>"),
    "eos_token": ("</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>"),
}


class Encoded(NamedTuple):
    """The tokens of a string.

    Attributes:
      tokens: the tokens, int32 `[tokens]`.
      spans: the start and end of each token in the string, in characters,
        `[tokens, 2]`.
    """

    tokens: np.ndarray
    spans: np.ndarray


class Tokenizer(Protocol):
    """Converts text to tokens; picklable, and safe to use from multiple threads."""

    @property
    def vocab_size(self) -> int:
        """The largest token plus one, including special tokens."""

    @property
    def begin(self) -> int | None:
        """The token that begins a document; None if there is none."""

    @property
    def end(self) -> int | None:
        """The token that ends a document; None if there is none."""

    @property
    def is_parallel(self) -> bool:
        """Whether multiple threads encode faster than one."""

    def encode(self, text: str | bytes) -> np.ndarray:
        """The tokens of `text`, without begin and end tokens, int32 `[tokens]`."""

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """The tokens of each string, as `encode` returns them."""

    def identity(self) -> storage.Json:
        """The settings that determine the tokens, without the file path."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes:
    """Byte-level tokens: a byte's token is its value plus 3, for any bytes."""

    vocab_size: int = dataclasses.field(default=tokens.VOCAB_SIZE, init=False)
    begin: int = dataclasses.field(default=tokens.BEGIN, init=False)
    end: int = dataclasses.field(default=tokens.END, init=False)
    is_parallel: bool = dataclasses.field(default=False, init=False)

    def encode(self, text: str | bytes) -> np.ndarray:
        """One token for each byte; a `str` is encoded as UTF-8."""
        content = text if isinstance(text, bytes) else readable(text).encode()
        return tokens.of_bytes(content)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """The tokens of each string."""
        return [self.encode(text) for text in texts]

    def encode_with_spans(self, texts: Sequence[str]) -> list[Encoded]:
        """The tokens of each string, with their spans."""
        encoded = []
        for text in map(readable, texts):
            widths = [len(character.encode()) for character in text]
            spans = np.repeat(np.arange(len(text)), widths)[:, None] + [0, 1]
            encoded.append(Encoded(self.encode(text), spans))
        return encoded

    def identity(self) -> storage.Json:
        """The tokenizer's kind; it has no file."""
        return {"kind": _BYTES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTokenizer:
    """A tokenizer in a file; `load` creates it.

    Only these fields are pickled: another process opens the file at `path`, an absolute
    path or URI, when it first encodes, and rejects a file with a different `digest`.
    """

    kind: str
    path: str
    digest: str
    vocab_size: int
    begin: int | None
    end: int | None
    is_parallel: bool = dataclasses.field(default=True, init=False)

    def encode(self, text: str | bytes) -> np.ndarray:
        """The tokens of `text`; invalid Unicode becomes U+FFFD."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """The tokens of each string, from one call to the library."""
        opened = _opened(self.kind, self.path, self.digest)
        encoded = opened.encode([readable(text) for text in texts])
        return [np.array(tokens, np.int32) for tokens in encoded]

    def encode_with_spans(self, texts: Sequence[str]) -> list[Encoded]:
        """The tokens of each string, with their spans.

        Raises:
          ConfigError: if the kind is not `"huggingface"`.
        """
        opened = _opened(self.kind, self.path, self.digest)
        if opened.encode_with_spans is None:
            raise errors.ConfigError(
                f"tokenizer kind {self.kind!r} would leave the special tokens of a chat"
                " template as plain text; use the model's tokenizer.json"
                " (tokenizer_type=huggingface), or the kind 'bytes'"
            )
        return opened.encode_with_spans([readable(text) for text in texts])

    def special_tokens(self) -> dict[str, str]:
        """The text of each special token by name, such as `bos_token`.

        Empty unless the kind is `"huggingface"`.
        """
        return dict(_opened(self.kind, self.path, self.digest).special_tokens or {})

    def special_texts(self) -> tuple[str, ...]:
        """The strings that become special tokens wherever they occur."""
        return _opened(self.kind, self.path, self.digest).special_texts

    def identity(self) -> storage.Json:
        """The kind, the digest of the file, and the begin and end tokens."""
        return {
            "kind": self.kind,
            "digest": self.digest,
            "begin": self.begin,
            "end": self.end,
        }


def load(kind: str, path: str = "") -> Tokenizer:
    """Loads a tokenizer from its file; a process opens each file once.

    Args:
      kind: `"bytes"` (a token per byte), `"sentencepiece"`, `"tiktoken"` or
        `"huggingface"`.
      path: the path or URI of a SentencePiece `.model` file, a `.tiktoken` file, or a
        `tokenizer.json` or its directory; empty for `"bytes"`.

    Raises:
      ConfigError: if the kind is unknown, if it is incompatible with `path`, or if its
        package is not installed.
      DataError: if the file is missing or not a valid file of this kind.
    """
    if kind not in KINDS or (kind == _BYTES) != (not path):
        files = ", ".join(f"{name} with {file}" for name, file in _FILES.items())
        raise errors.ConfigError(
            f"tokenizer kind {kind!r} cannot be used with the path {path!r}"
            " (tokenizer_type and tokenizer_path in a configuration); choose"
            f" {_BYTES} without a path, or {files}"
        )
    if kind == _BYTES:
        return Bytes()
    file = storage.absolute(os.path.expanduser(path))
    if kind == "huggingface" and file.is_dir():
        file /= "tokenizer.json"
    digest, path = digests.bytes_digest(_read(kind, file)), os.fspath(file)
    opened = _opened(kind, path, digest)
    return FileTokenizer(
        kind=kind,
        path=path,
        digest=digest,
        vocab_size=opened.vocab_size,
        begin=opened.begin,
        end=opened.end,
    )


class _Opened(NamedTuple):
    encode: Callable[[list[str]], list[list[int]]]
    vocab_size: int
    begin: int | None
    end: int | None
    encode_with_spans: Callable[[list[str]], list[Encoded]] | None = None
    special_tokens: Mapping[str, str] | None = None
    special_texts: tuple[str, ...] = ()


_opening = threading.Lock()


def _opened(kind: str, path: str, digest: str) -> _Opened:
    with _opening:
        return _open(kind, path, digest)


@functools.cache
def _open(kind: str, path: str, digest: str) -> _Opened:
    content = _read(kind, epath.Path(path))
    if digests.bytes_digest(content) != digest:
        raise errors.DataError(
            f"{path} has a different digest than the loaded tokenizer; use the same"
            " file on every host"
        )
    try:
        return _OPEN[kind](content, epath.Path(path).parent)
    except errors.ElasticCkptError:
        raise
    except Exception as error:  # `tokenizers` raises nothing narrower
        raise errors.DataError(
            f"{path} cannot be read as {_FILES[kind]} ({error}); restore the file from"
            " a good copy, or specify its actual kind (tokenizer_type in a"
            " configuration)"
        ) from None


def _open_sentencepiece(content: bytes, _: epath.Path) -> _Opened:
    model = _package("sentencepiece").SentencePieceProcessor()
    model.LoadFromSerializedProto(content)
    begin, end = (
        token if token >= 0 else None for token in (model.bos_id(), model.eos_id())
    )
    # Encodes in the calling thread, because the caller has its own threads.
    encode = functools.partial(model.encode, num_threads=1)
    return _Opened(encode, model.vocab_size(), begin, end)


def _open_tiktoken(content: bytes, _: epath.Path) -> _Opened:
    pairs = map(bytes.split, content.splitlines())
    ranks = {base64.b64decode(each, validate=True): int(rank) for each, rank in pairs}
    has_bytes = all(bytes([byte]) in ranks for byte in range(256))
    if not has_bytes or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("it lacks tokens or ranks, so it was truncated or altered")
    begin, end = len(ranks), len(ranks) + 1
    encoding = _package("tiktoken").Encoding(
        name="llama3",
        pat_str=LLAMA3_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|begin_of_text|>": begin, "<|end_of_text|>": end},
    )

    def encode(texts: list[str]) -> list[list[int]]:
        # tiktoken's batch function would create a thread pool.
        return [
            [
                token
                for first in range(0, len(text), _MAX_CHARACTERS)
                for token in encoding.encode_ordinary(
                    text[first : first + _MAX_CHARACTERS]
                )
            ]
            for text in texts
        ]

    return _Opened(encode, len(ranks) + _LLAMA3_NUM_SPECIAL, begin, end)


def _open_huggingface(content: bytes, directory: epath.Path) -> _Opened:
    tokenizer = _package("tokenizers").Tokenizer.from_str(content.decode())
    if getattr(tokenizer.model, "dropout", None):
        raise ValueError("it drops merges at random; set its dropout to null")
    # The file may enable these, but tokens must not depend on the batch's length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab()
    special = _special_tokens(directory, vocabulary)
    begin, end = (vocabulary.get(special.get(key)) for key in _USUAL)
    # The library's own threads would use every core of the machine, regardless of the
    # configuration, and would not survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def encode(texts: list[str]) -> list[list[int]]:
        # The fast variant skips token spans, which are not used here.
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encoded]

    def encode_with_spans(texts: list[str]) -> list[Encoded]:
        return [
            Encoded(
                np.array(each.ids, np.int32),
                np.array(each.offsets, np.int64).reshape(-1, 2),
            )
            for each in tokenizer.encode_batch(texts, add_special_tokens=False)
        ]

    return _Opened(
        encode,
        max(vocabulary.values(), default=-1) + 1,
        begin,
        end,
        encode_with_spans,
        special,
        tuple(
            added.content
            for added in tokenizer.get_added_tokens_decoder().values()
            if added.special and added.content
        ),
    )


def _special_tokens(
    directory: epath.Path, vocabulary: Mapping[str, int]
) -> dict[str, str]:
    # The text of each special token named in the files next to a tokenizer.json.
    named: dict[str, Any] = {
        key: next((text for text in usual if text in vocabulary), None)
        for key, usual in _USUAL.items()
    }
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        named |= _settings(directory / file)
    special = {}
    for key, value in named.items():
        # The files store a token's text in two ways.
        text = value["content"] if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            special[key] = text
            if key in _USUAL and text not in vocabulary:
                raise ValueError(
                    f"it lacks {text!r}, which a file next to it lists as {key}"
                )
    return special


def _settings(file: epath.Path) -> Mapping[str, Any]:
    try:
        return dict(json.loads(file.read_bytes())) if file.exists() else {}
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{file.name} next to it is not a JSON object ({error})"
        ) from None


def _read(kind: str, file: epath.Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise errors.DataError(
            f"{file} cannot be read ({error.strerror or error}); specify"
            f" {_FILES[kind]} (tokenizer_path in a configuration)"
        ) from None


def readable(text: str | bytes) -> str:
    """Converts `text` to valid Unicode; invalid parts become U+FFFD.

    JSON can put half a surrogate pair into a `str`, which tokenizer libraries reject.
    """
    if isinstance(text, str):
        if text.isascii():
            return text
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text.decode(errors="replace")


_package = functools.partial(
    extras.module, extra="tokenizers", otherwise="set tokenizer_type to bytes"
)
_OPEN = {
    "sentencepiece": _open_sentencepiece,
    "tiktoken": _open_tiktoken,
    "huggingface": _open_huggingface,
}
