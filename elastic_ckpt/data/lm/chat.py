"""Conversations and preference pairs as examples of a language model.

`Conversations` takes the place of `language.Documents`: it renders each record by a
chat template, and makes its tokens. A token of which no loss counts, such as one that
the user says, is kept as its complement, `~token`, which is negative. So a mask takes
no array of its own, and stays with its tokens when documents are chunked, mixed,
shuffled and packed, in blocks or one by one. Last, `MaskedTargets` turns rows into what
MaxText's are: all tokens are inputs, but a masked target is 0, and so is its
segmentation.

`Preferences` makes the tokens of prompts, chosen and rejected responses, and
`PreferenceRows` pads them as MaxText's DPO does. A pair is one element from the record
to the row, so its two responses stay together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import grain
import numpy as np
from absl import logging

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import records, shard_steps
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.lm import chat_templates, language, tokenizers
from elastic_ckpt.data.sources import files

Example = dict[str, np.ndarray]
Messages = list[chat_templates.Message]

_NO_TOKENS = np.empty(0, np.int32)
_BYTES = tokenizers.Bytes()
_KEYS = "train_data_columns in a configuration"
# The names of the field with what the assistant thinks, by precedence.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Pairs of columns with a user's text and the assistant's, as MaxText names them.
_COMPLETIONS = (("prompt", "completion"), ("question", "answer"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversations:
    """How records become conversations of tokens, for `Tokens`.

    The template alone says which tokens begin and end a conversation. The text of a
    special token becomes that token wherever it is, in the template or in a message,
    as with Hugging Face's `apply_chat_template`.

    A conversation in which no loss counts makes no example.

    Attributes:
      columns: the column with the messages, each with `role` and `content`; or two
        columns, of the prompt and of the completion, each with messages or a text.
      template: renders the messages.
      tokenizer: `Bytes`, or one of a `tokenizer.json`.
      completion_only: whether the loss counts what the assistant says alone, and not
        all tokens.
    """

    columns: tuple[str, ...] = ("messages",)
    template: chat_templates.ChatTemplate
    tokenizer: tokenizers.Tokenizer = _BYTES
    completion_only: bool = False

    def __post_init__(self) -> None:
        columns = files.names(self.columns, argument="Conversations: columns")
        if tuple(reversed(columns)) in _COMPLETIONS:
            columns = tuple(reversed(columns))
        object.__setattr__(self, "columns", columns)
        if len(columns) not in (1, 2):
            raise errors.ConfigError(
                f"Conversations: columns={columns!r} ({_KEYS}); name one column of"
                " messages, or two, of the prompt and of the completion"
            )
        _check_tokenizer(self.tokenizer)

    @property
    def column(self) -> str:
        """The columns, for messages."""
        return ",".join(self.columns)

    @property
    def is_parallel(self) -> bool:
        """Whether several threads tokenise faster than one thread."""
        return self.tokenizer.is_parallel

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the tokens, by configuration key."""
        return {
            "use_sft": True,
            "sft_train_on_completion_only": self.completion_only,
            "train_data_columns": self.column,
            "tokenizer": self.tokenizer.identity(),
            "chat_template": self.template.identity(),
        }

    def messages(self, element: dict[str, Any]) -> Messages:
        """The messages of a record, as the template gets them; none for a null value.

        Raises:
          DataError: if a column is missing or has no messages.
        """
        values = [_text_or_messages(element, column) for column in self.columns]
        if len(values) == 1 and isinstance(values[0], str):
            raise errors.DataError(
                f"column {self.column!r} has a text, not a list of messages; name the"
                f" column of the conversation, or two, of prompt and completion"
                f" ({_KEYS})"
            )
        turns = list(map(_turn, values, ("user", chat_templates.ASSISTANT)))
        return list(itertools.chain(*turns)) if all(turns) else []

    def value(self, element: dict[str, Any]) -> chat_templates.Rendered | None:
        """The conversation of a record as text; None for a null value.

        Raises:
          DataError: if a column is missing or has no messages, or the template cannot
            render them.
        """
        messages = self.messages(element)
        if not messages:
            return None
        _warn_of_special_texts(messages, self.tokenizer)
        with _naming_record(element):
            if self.completion_only:
                return self.template.render_with_spans(messages)
            text = self.template.render(messages)
        # Also around tokens without characters, at the ends.
        return chat_templates.Rendered(text=text, spans=((-1, len(text) + 1),))

    def tokens(
        self, values: Sequence[chat_templates.Rendered | None]
    ) -> list[np.ndarray]:
        """The tokens of each conversation, int32; one that does not count is `~token`.

        None, and a conversation in which none counts, have none.
        """
        texts = [value.text for value in values if value is not None]
        encoded = iter(cast(Any, self.tokenizer).encode_with_spans(texts))
        return [
            _NO_TOKENS if value is None else _masked(next(encoded), value.spans)
            for value in values
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences:
    """How records become preference pairs of tokens, for `Tokens`.

    If the columns have messages, the template renders them: the prompt up to the
    beginning of the assistant's turn, and the responses after it. If they have texts,
    these are encoded as they are.

    Attributes:
      columns: the columns of the prompt, the chosen and the rejected response. Of two
        columns, chosen and rejected, the prompt is what both begin with: messages, or
        tokens of texts.
      template: renders messages; None if there are only texts.
      tokenizer: `Bytes`, or one of a `tokenizer.json`; for texts, any.
      add_begin: whether a prompt that is a text begins with the begin token.
      add_end: whether a response that is a text ends with the end token.
    """

    columns: tuple[str, ...] = ("prompt", "chosen", "rejected")
    template: chat_templates.ChatTemplate | None = None
    tokenizer: tokenizers.Tokenizer = _BYTES
    add_begin: bool = True
    add_end: bool = True

    def __post_init__(self) -> None:
        columns = files.names(self.columns, argument="Preferences: columns")
        object.__setattr__(self, "columns", columns)
        if len(columns) not in (2, 3):
            raise errors.ConfigError(
                f"Preferences: columns={columns!r} ({_KEYS}); name those of the prompt,"
                " the chosen and the rejected response, or of chosen and rejected"
            )
        if self.template is not None:
            _check_tokenizer(self.tokenizer)

    @property
    def column(self) -> str:
        """The columns, for messages."""
        return ",".join(self.columns)

    @property
    def is_parallel(self) -> bool:
        """Whether several threads tokenise faster than one thread."""
        return self.tokenizer.is_parallel

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the tokens, by configuration key."""
        return {
            "use_dpo": True,
            "train_data_columns": self.column,
            "tokenizer": self.tokenizer.identity(),
            "add_bos": self.add_begin,
            "add_eos": self.add_end,
            "chat_template": self.template.identity() if self.template else None,
        }

    def value(self, element: dict[str, Any]) -> PairTexts | None:
        """The texts of a record's pair; None if one of its values is null.

        Raises:
          DataError: if a column is missing or has neither text nor messages, a prompt
            is missing, or the template cannot render the messages.
        """
        values = [_text_or_messages(element, column) for column in self.columns]
        if any(value is None for value in values):
            return None
        kinds = {type(value) for value in values}
        if kinds == {str}:
            prompt = values[0] if len(values) == 3 else None
            chosen, rejected = values[-2:]
            return PairTexts(prompt, chosen, rejected, is_rendered=False)
        with _naming_record(element):
            return self._rendered(values)

    def tokens(self, values: Sequence[PairTexts | None]) -> list[Pair | None]:
        """The tokens of each pair; None for None."""
        texts = [
            text
            for value in values
            if value is not None
            for text in (value.prompt or "", value.chosen, value.rejected)
        ]
        encoded = iter(self.tokenizer.encode_batch(texts))
        return [
            None
            if value is None
            else self._pair(value, next(encoded), next(encoded), next(encoded))
            for value in values
        ]

    def _rendered(self, values: Sequence[Any]) -> PairTexts:
        if self.template is None:
            raise errors.DataError(
                f"the columns {list(self.columns)} have messages, which only a chat"
                " template can render; set chat_template_path, or use a tokenizer that"
                " comes with one"
            )
        roles = ("user", *[chat_templates.ASSISTANT] * 2)[-len(values) :]
        turns = list(map(_turn, values, roles))
        chosen, rejected = turns[-2:]
        if len(turns) == 3:
            prompt = turns[0]
        else:
            prompt = _common(chosen, rejected)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        if not (prompt and chosen and rejected):
            raise errors.DataError(
                "a pair has no message in its prompt or in a response; the prompt is"
                " what chosen and rejected begin with, or a column of its own"
            )
        _warn_of_special_texts([*prompt, *chosen, *rejected], self.tokenizer)
        begin = self.template.render(prompt, add_generation_prompt=True)
        responses = []
        for messages in (chosen, rejected):
            text = self.template.render([*prompt, *messages])
            if not text.startswith(begin):
                raise errors.DataError(
                    "the chat template renders the prompt of a pair in another way than"
                    " in the whole conversation, so it does not show where the response"
                    " begins; use another one (chat_template_path in a configuration)"
                )
            responses.append(text[len(begin) :])
        return PairTexts(begin, responses[0], responses[1], is_rendered=True)

    def _pair(
        self,
        texts: PairTexts,
        prompt: np.ndarray,
        chosen: np.ndarray,
        rejected: np.ndarray,
    ) -> Pair:
        if texts.is_rendered:
            # The template has put the special tokens.
            return Pair(prompt, chosen, rejected)
        if texts.prompt is None:
            size = min(len(chosen), len(rejected))
            differs = np.flatnonzero(chosen[:size] != rejected[:size])
            size = int(differs[0]) if len(differs) else size
            prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
        if self.add_begin and self.tokenizer.begin is not None:
            prompt = np.insert(prompt, 0, self.tokenizer.begin)
        if self.add_end and self.tokenizer.end is not None:
            chosen = np.append(chosen, np.int32(self.tokenizer.end))
            rejected = np.append(rejected, np.int32(self.tokenizer.end))
        return Pair(prompt, chosen, rejected)


@dataclasses.dataclass(frozen=True, slots=True)
class PairTexts:
    """The texts of a preference pair.

    Attributes:
      prompt: None if it is what both responses begin with.
      chosen: the preferred response.
      rejected: the other one.
      is_rendered: whether a template has rendered them.
    """

    prompt: str | None
    chosen: str
    rejected: str
    is_rendered: bool

    def __len__(self) -> int:
        return len(self.prompt or "") + len(self.chosen) + len(self.rejected)


class Pair(NamedTuple):
    """The tokens of a preference pair, each int32 `[tokens]`."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray


class MaskedTargets(shard_steps.Step[Example]):
    """Rows of conversations, with the loss mask where MaxText has it.

    Each token is an input. A target that does not count is 0, and 0 in
    `targets_segmentation`, which is the segment of a target that counts.

    Args:
      parent: rows that `packed` or padding makes of `Conversations`.
    """

    def __init__(self, parent: grain.IterDataset) -> None:
        super().__init__(parent)

    def __iter__(self) -> grain.DatasetIterator[Example]:
        return language.Mapped(iter(self._parent), _with_mask)

    def settings(self) -> dict[str, storage.Json]:
        """None."""
        return {}


def _with_mask(row: Example) -> Example:
    inputs, targets = row["inputs"], row["targets"]
    counts = targets >= 0
    return {
        **row,
        "inputs": np.where(inputs < 0, ~inputs, inputs),
        "targets": np.where(counts, targets, token_numbers.PAD),
        "targets_segmentation": row["targets_segmentation"] * counts,
    }


class PreferenceRows(shard_steps.Step[Example]):
    """Pads each preference pair to a row, with the features of MaxText's DPO.

    A row has `prompt_ids`, `[max_prompt_length]`, with padding before it, and
    `chosen_ids` and `rejected_ids`, `[length - max_prompt_length]`, with padding after
    them; and `prompt_mask`, `chosen_mask` and `rejected_mask`, which are 1 for tokens
    and 0 for padding. All are int32. A longer prompt keeps its end, a longer response
    its beginning.

    Args:
      parent: pairs, as `Tokens` makes them of `Preferences`.
      length: tokens of a prompt and one response.
      max_prompt_length: those of the prompt.

    Raises:
      ConfigError: if nothing is left for a prompt or a response.
    """

    def __init__(
        self, parent: grain.IterDataset, *, length: int, max_prompt_length: int
    ) -> None:
        super().__init__(parent)
        if not 0 < max_prompt_length < length:
            raise errors.ConfigError(
                f"PreferenceRows: max_prompt_length={max_prompt_length}"
                f" (dpo_max_prompt_length) of length={length} (max_target_length); give"
                " at least 1, and leave at least 1 for the response"
            )
        self._length, self._max_prompt_length = length, max_prompt_length

    def __iter__(self) -> grain.DatasetIterator[Example]:
        pad = functools.partial(
            _padded,
            prompt_length=self._max_prompt_length,
            response_length=self._length - self._max_prompt_length,
        )
        return iter(self._parent.filter(_is_pair).map(pad))

    def settings(self) -> dict[str, storage.Json]:
        """The lengths."""
        return {"length": self._length, "max_prompt_length": self._max_prompt_length}


def _is_pair(pair: Pair | None) -> bool:
    return pair is not None


def _padded(pair: Pair, *, prompt_length: int, response_length: int) -> Example:
    row = {}
    for name, tokens in zip(Pair._fields, pair, strict=True):
        is_prompt = name == "prompt"
        length = prompt_length if is_prompt else response_length
        tokens = tokens[-length:] if is_prompt else tokens[:length]
        missing = length - len(tokens)
        widths = (missing, 0) if is_prompt else (0, missing)
        row[f"{name}_ids"] = np.pad(tokens.astype(np.int32), widths)
        row[f"{name}_mask"] = np.pad(np.ones(len(tokens), np.int32), widths)
    return row


def _masked(
    encoded: tokenizers.Encoded, spans: Sequence[tuple[int, int]]
) -> np.ndarray:
    # A token counts if it has a character of a span.
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    # Some tokenizers leave out spaces, so that a token of spaces ends where it begins.
    first = encoded.begin - (encoded.begin == encoded.end)
    # The first span that ends after the first character of a token; none begins at the
    # end of everything.
    number = np.searchsorted(ends, first, side="right")
    counts = np.append(begins, np.iinfo(np.int64).max)[number] < encoded.end
    if not counts.any():
        return _NO_TOKENS
    return np.where(counts, encoded.tokens, ~encoded.tokens)


def _check_tokenizer(tokenizer: tokenizers.Tokenizer) -> None:
    # Raises a ConfigError if the special tokens of a template would be plain text.
    if not hasattr(tokenizer, "encode_with_spans"):
        raise errors.ConfigError(
            f"a {type(tokenizer).__name__} has no encode_with_spans, which chat"
            " templates need; use ec.data.lm.load_tokenizer"
        )
    tokenizer.encode_with_spans([])


def _warn_of_special_texts(messages: Messages, tokenizer: tokenizers.Tokenizer) -> None:
    # A message could end its turn so, or begin another.
    texts: tuple[str, ...] = getattr(tokenizer, "special_texts", tuple)()
    if not texts:
        return
    for message in messages:
        said = message.get("content")
        found = _any_of(texts).search(said) if isinstance(said, str) else None
        if found:
            logging.log_first_n(
                logging.WARNING,
                "a message has the text %r, which becomes a special token; remove such"
                " texts if those who wrote the messages are not trusted",
                1,
                found[0],
            )
            return


@functools.lru_cache(maxsize=8)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


@contextlib.contextmanager
def _naming_record(element: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except errors.DataError as error:
        number = element.get(records.RECORD)
        if number is None:
            raise
        raise errors.DataError(f"record {number}: {error}") from None


def _turn(value: Any, role: str) -> Any:
    # Messages as they are; a text is one message of the role.
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _text_or_messages(element: dict[str, Any], column: str) -> Any:
    if column not in element:
        raise errors.DataError(
            f"a record has no column {column!r}, only {sorted(element)}; name the"
            f" column ({_KEYS})"
        )
    value = element[column]
    if value is None:
        return None
    if isinstance(value, str | bytes):
        return tokenizers.readable(value)
    if isinstance(value, np.ndarray) and not value.size:
        value = []
    if not isinstance(value, list):
        raise errors.DataError(
            f"column {column!r} has a {type(value).__name__}, not a list of messages;"
            f" name the column of the conversation ({_KEYS})"
        )
    try:
        return [_message(each, column) for each in value]
    except RecursionError:
        raise errors.DataError(
            f"column {column!r} has a message that is nested too deeply; leave it out"
        ) from None


def _message(value: Any, column: str) -> chat_templates.Message:
    if not (isinstance(value, Mapping) and isinstance(value.get("role"), str)):
        found = sorted(value) if isinstance(value, Mapping) else type(value).__name__
        raise errors.DataError(
            f"column {column!r} has a message with {found}; a message has a role and a"
            " content"
        )
    # As Hugging Face does: files of columns have nulls for fields that are missing, and
    # templates read thoughts by one of several names.
    message = {
        str(key): _plain(each, column)
        for key, each in value.items()
        if each is not None
    }
    thoughts = next((message[key] for key in _THOUGHTS if key in message), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _plain(value: Any, column: str) -> Any:
    # A value of JSON's types alone: what else a template is given may have methods.
    # Texts have no halves of surrogate pairs, which are marks in a rendered text.
    if isinstance(value, str):
        return tokenizers.readable(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            _plain(key, column): _plain(item, column) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(each, column) for each in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), column)
    raise errors.DataError(
        f"column {column!r} has a {type(value).__name__} in a message; messages have"
        " texts, numbers, lists and fields"
    )


def _common(one: Messages, other: Messages) -> Messages:
    # The messages that both begin with; at least one of each is left.
    number = 0
    while number < min(len(one), len(other)) - 1 and one[number] == other[number]:
        number += 1
    return one[:number]
