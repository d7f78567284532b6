"""Conversations as training examples for a language model.

`Conversations` replaces `Documents`: it renders each record with a chat template and
tokenizes it. A token excluded from the loss, as in a user turn, is stored as its
complement, `~token`, which is negative. The loss mask therefore needs no array of its
own and stays with its tokens when documents are mixed, split, shuffled and packed;
`Rows` converts it to the features of MaxText's rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from absl import logging

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.lm import chat_templates, tokenizers
from elastic_ckpt.data.sources import files

Messages = list[chat_templates.Message]

_NO_TOKENS = np.empty(0, np.int32)
_BYTES = tokenizers.Bytes()
_KEYS = "train_data_columns in a configuration"
# Names of the field with the assistant's reasoning, in order of precedence.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")

# Counts the conversations without loss in this process.
_WITHOUT_LOSS = itertools.count(1)

# MaxText's names for the completion and the prompt, in reverse order.
_REVERSED = (("completion", "prompt"), ("answer", "question"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversations:
    """Converts records to tokenized conversations, for `Tokens`.

    Only the template determines which tokens begin and end a conversation. The text of
    a special token becomes that token anywhere in the template or a message, as in
    Hugging Face's `apply_chat_template`.

    A conversation in which no token has loss yields no example; the log counts them.
    If a record has a field `tools`, a list or its JSON, the template renders it.

    Attributes:
      columns: the name of the column with the messages, each with `role` and `content`;
        or the names of the prompt and completion columns, each with messages or text.
      template: the template that renders the messages.
      tokenizer: a `Bytes` tokenizer, or one loaded from a `tokenizer.json`.
      completion_only: whether only the assistant's tokens have loss.
      length: the number of tokens per row, if `Rows` truncates conversations to it, so
        that later tokens have no loss; 0 if it does not.
    """

    columns: tuple[str, ...] = ("messages",)
    template: chat_templates.ChatTemplate
    tokenizer: tokenizers.Tokenizer = _BYTES
    completion_only: bool = False
    length: int = 0

    def __post_init__(self) -> None:
        columns = files.names(self.columns, argument="Conversations: columns")
        if columns in _REVERSED:
            columns = columns[::-1]
        object.__setattr__(self, "columns", columns)
        if len(columns) not in (1, 2):
            raise errors.ConfigError(
                f"Conversations: columns={columns!r} ({_KEYS}); list one column"
                " of messages, or two columns: the prompt and the completion"
            )
        # Raises an error if the tokenizer would leave special tokens as plain text.
        cast(Any, self.tokenizer).encode_with_spans([])

    @property
    def column(self) -> str:
        """The column names, joined for error messages."""
        return ",".join(self.columns)

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the tokens, keyed by configuration key."""
        return {
            "use_sft": True,
            "sft_train_on_completion_only": self.completion_only,
            "train_data_columns": self.column,
            "tokenizer": self.tokenizer.identity(),
            "chat_template": self.template.identity(),
            "max_target_length": self.length,
        }

    def messages(self, element: dict[str, Any]) -> Messages:
        """A record's messages, for the template; empty if a column is null.

        Raises:
          DataError: if a column is missing or does not contain messages.
        """
        roles = ("user", chat_templates.ASSISTANT) if len(self.columns) == 2 else ("",)
        turns = [
            _turns(element, column, role=role)
            for column, role in zip(self.columns, roles, strict=True)
        ]
        return list(itertools.chain(*turns)) if all(turns) else []

    def value(self, element: dict[str, Any]) -> chat_templates.Rendered | None:
        """A record's conversation as text; None if a column is null.

        Raises:
          DataError: if a column is missing or does not contain messages, or if the
            template cannot render the messages.
        """
        messages = self.messages(element)
        if not messages:
            return None
        tools = _tools(element)
        _warn_of_special_texts([*messages, *tools], self.tokenizer)
        if self.completion_only:
            return self.template.render_with_spans(messages, tools=tools)
        text = self.template.render(messages, tools=tools)
        # Extends past both ends to include tokens that have no characters.
        return chat_templates.Rendered(text=text, spans=((-1, len(text) + 1),))

    def tokens(
        self, values: Sequence[chat_templates.Rendered | None]
    ) -> list[np.ndarray]:
        """The tokens of each conversation, int32; `~token` if excluded from the loss.

        The array is empty for None and for a conversation without loss.
        """
        texts = [value.text for value in values if value is not None]
        encoded = iter(cast(Any, self.tokenizer).encode_with_spans(texts))
        return [
            _NO_TOKENS
            if value is None
            else _masked(next(encoded), value.spans, self.length)
            for value in values
        ]


def _masked(
    encoded: tokenizers.Encoded, spans: Sequence[tuple[int, int]], length: int
) -> np.ndarray:
    # A token has loss if it overlaps a span.
    begins, ends = np.array(spans, np.int64).reshape(-1, 2).T
    first, stop = encoded.spans.T
    # For each token, the first span that ends after the token begins; past the last
    # span, one at infinity.
    number = np.searchsorted(ends, first, side="right")
    counts = np.append(begins, np.iinfo(np.int64).max)[number] < stop
    # The first token is not a target.
    if not counts[1 : length + 1 if length else None].any():
        logging.log_every_n(
            logging.WARNING,
            "%d conversations so far were left out, because none of their tokens that"
            " fit into a row has loss",
            1000,
            next(_WITHOUT_LOSS),
        )
        return _NO_TOKENS
    return np.where(counts, encoded.tokens, ~encoded.tokens)


def _warn_of_special_texts(messages: Messages, tokenizer: Any) -> None:
    # With such text, a message could end its turn and begin another role's.
    texts = getattr(tokenizer, "special_texts", tuple)()
    if found := _any_of(texts).search(json.dumps(messages, ensure_ascii=False)):
        logging.log_first_n(
            logging.WARNING,
            "a message contains the text %r, which becomes a special token; remove such"
            " text if you do not trust the authors of the messages",
            1,
            found[0],
        )


@functools.cache
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    # With no texts, the pattern matches nothing.
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def _tools(element: Mapping[str, Any]) -> Messages:
    # As in Hugging Face's trainers: a list, or the JSON of a list.
    value = element.get("tools")
    try:
        value = json.loads(value or "[]") if isinstance(value, str | bytes) else value
        return _plain({"tools": list(value or ())}, "tools")["tools"]
    except (TypeError, ValueError) as error:
        raise errors.DataError(
            f"column 'tools' is not a list of tools, or its JSON ({error}); correct the"
            " record"
        ) from None


def _turns(element: dict[str, Any], column: str, *, role: str) -> Messages:
    # If a role is given, a string is one message with that role.
    value = token_numbers.in_column(element, column)
    if value is None:
        return []
    if role and isinstance(value, str | bytes):
        return [{"role": role, "content": tokenizers.readable(value)}]
    if not isinstance(value, list):
        raise errors.DataError(
            f"column {column!r} contains {type(value).__name__}, not a list of"
            f" messages; in columns ({_KEYS}), name the conversation column, or the"
            " prompt and completion columns"
        )
    return [_message(each, column) for each in value]


def _message(value: Any, column: str) -> chat_templates.Message:
    if not (isinstance(value, Mapping) and isinstance(value.get("role"), str)):
        found = sorted(value) if isinstance(value, Mapping) else type(value).__name__
        raise errors.DataError(
            f"column {column!r} has an invalid message ({found}); each message must"
            " have a role and content"
        )
    # As in Hugging Face: columnar files have nulls for missing fields, and templates
    # read the reasoning under one of several names.
    message = _plain({k: v for k, v in value.items() if v is not None}, column)
    thoughts = next((message[key] for key in _THOUGHTS if key in message), None)
    if thoughts is None:
        return message
    return {"thinking": thoughts, **message, "reasoning_content": thoughts}


def _plain(value: Mapping[str, Any], column: str) -> chat_templates.Message:
    # Allows only JSON types, because a template could call methods of other objects.
    # Replaces half surrogate pairs, because they mark spans in rendered text.

    def as_list(item: Any) -> Any:
        if isinstance(item, np.ndarray | np.generic):
            return item.tolist()
        raise errors.DataError(
            f"column {column!r} has a message that contains {type(item).__name__};"
            " messages may contain only text, numbers, lists and objects"
        )

    try:
        text = json.dumps(value, ensure_ascii=False, default=as_list)
    except RecursionError:
        raise errors.DataError(
            f"column {column!r} has a message that is nested too deeply; remove this"
            " message"
        ) from None
    return json.loads(tokenizers.readable(text))
