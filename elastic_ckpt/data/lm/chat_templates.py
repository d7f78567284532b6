"""Chat templates: what a model's conversations look like as one text.

A template is a program in Jinja that comes with a tokenizer: `chat_template.jinja`, or
the field `chat_template` of `tokenizer_config.json`. It renders what Hugging Face's
`apply_chat_template` renders, from the same variables. Jinja's sandbox keeps it from
reaching Python, but limits neither its time nor its memory.

What the assistant says is found in two ways. If the template has `{% generation %}`
blocks, it is what they render. Otherwise the conversation is also rendered up to each
turn of the assistant, and up to its end: what comes in between is the turn. That
requires each rendering to begin the next one; a template for which this does not hold
is refused.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import digest, errors, extras, storage
from elastic_ckpt.data.lm import tokenizers

Message = dict[str, Any]

ASSISTANT = "assistant"

# Beside the file of a tokenizer, by precedence.
_FILES = ("chat_template.jinja", "tokenizer_config.json")
_FIELD = "chat_template"
# Around what `{% generation %}` blocks render. No message has these halves of pairs.
_MARKS = "\ud800\udbff"
_MARK = re.compile(f"[{_MARKS}]")
_GENERATION = re.compile(r"{%[-+]?\s*generation\b")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation as text.

    Attributes:
      text: all of it.
      spans: the first character of each part that the assistant says, and the one after
        its last; ascending.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A chat template, as a value that can be pickled; `load_chat_template` makes it.

    Attributes:
      text: in Jinja.
      special_tokens: the texts of the tokenizer's special tokens by the names of the
        template's variables, such as `bos_token`.
      date: the date that `strftime_now` has, `YYYY-MM-DD`. Without it, a template that
        asks for the date is refused, because rows would change from day to day.

    Raises:
      ConfigError: if the text is no template.
    """

    text: str
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    date: str = ""

    def __post_init__(self) -> None:
        _compiled(self.text)

    def identity(self) -> dict[str, storage.Json]:
        """The digest of the text, and what it reads beside messages."""
        read = {**self.special_tokens, "strftime_now": self.date}
        return {
            "digest": digest.json_digest(self.text),
            **{name: read[name] for name in sorted(read) if name in self.text},
        }

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> str:
        """A conversation as text.

        Args:
          messages: dicts with `role` and `content`, of JSON's types.
          add_generation_prompt: whether the text ends with the beginning of a turn of
            the assistant.

        Raises:
          DataError: if the template refuses the conversation, or has an error.
        """
        return self._rendered(messages, add_generation_prompt).text

    def render_with_spans(self, messages: Sequence[Message]) -> Rendered:
        """A conversation as text, and where the assistant speaks.

        Raises:
          DataError: as `render`; or if the template does not show where it speaks.
        """
        whole = self._rendered(messages, False)
        if _GENERATION.search(self.text):
            return whole
        text = whole.text
        turns = []
        for number, message in enumerate(messages):
            if message.get("role") == ASSISTANT:
                begin = self._begin(messages[:number], text, prompt=True)
                end = self._begin(messages[: number + 1], text, prompt=False)
                turns.append((begin, end))
        return Rendered(text=text, spans=tuple(turns))

    def _begin(self, messages: Sequence[Message], text: str, *, prompt: bool) -> int:
        # The length of the first messages in the text of all.
        begin = self.render(messages, add_generation_prompt=prompt)
        if not text.startswith(begin):
            raise errors.DataError(
                "the chat template renders the first"
                f" {len(messages)} messages of a conversation in another way than in"
                " the whole conversation, so it does not show which part the assistant"
                " says; mark that by {% generation %} ... {% endgeneration %} in a copy"
                " of the template (chat_template_path in a configuration), or train on"
                " all turns (sft_train_on_completion_only=false)"
            )
        return len(begin)

    def _rendered(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> Rendered:
        # With the spans of `{% generation %}` blocks.
        try:
            marked = _compiled(self.text).render(
                **self.special_tokens,
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                raise_exception=_refuse,
                strftime_now=functools.partial(_strftime, self.date),
            )
        except errors.DataError:
            raise
        except Exception as error:  # a template may raise anything
            raise errors.DataError(
                f"the chat template cannot render a conversation: {_shown(error)};"
                " correct the template (chat_template_path in a configuration) or the"
                " messages"
            ) from None
        return _without_marks(marked)


def load_chat_template(
    tokenizer: tokenizers.Tokenizer,
    *,
    text: str = "",
    path: epath.PathLike = "",
    date: str = "",
) -> ChatTemplate:
    """Loads a chat template: the given one, or that of a tokenizer's files.

    Beside a `tokenizer.json`, `chat_template.jinja` is the first choice, and the field
    `chat_template` of `tokenizer_config.json` the second; of several, the one that is
    named `default`.

    Args:
      tokenizer: which special tokens the template has, and what files are beside it.
      text: the template itself, instead of a file.
      path: the path or URI of a file with the template: its text, or, if its name ends
        in `.json`, an object with the field `chat_template`.
      date: see `ChatTemplate`.

    Raises:
      ConfigError: if there is no template, or its text is none.
      DataError: if a file cannot be read.
    """
    files = [storage.absolute(os.path.expanduser(path))] if path else []
    of_tokenizer = getattr(tokenizer, "path", "")
    if of_tokenizer and not path:
        beside = [epath.Path(of_tokenizer).parent / name for name in _FILES]
        files = [file for file in beside if file.exists()]
    text = text or (_of_file(files[0]) if files else "")
    if not text:
        raise errors.ConfigError(
            f"there is no chat template: neither {_FILES[0]} nor the field {_FIELD!r}"
            f" in {_FILES[1]} is beside the tokenizer {of_tokenizer or tokenizer!r};"
            " set chat_template_path to the file of one"
        )
    special_tokens = getattr(tokenizer, "special_tokens", dict)()
    return ChatTemplate(text=text, special_tokens=special_tokens, date=date)


def _of_file(file: epath.Path) -> str:
    try:
        template = file.read_bytes().decode()
        if file.suffix == ".json":
            template = json.loads(template).get(_FIELD, "")
        if isinstance(template, list):
            # The others are for conversations with tools.
            named = {each["name"]: each["template"] for each in template}
            template = named.get("default", "")
        if not isinstance(template, str):
            raise TypeError(f"its field {_FIELD!r} is no text")
        return template
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise errors.DataError(
            f"{file}: cannot be read as a chat template ({error}); restore it from a"
            " copy, or set chat_template_path to the file of a template"
        ) from None


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> Any:
    environment = _environment()
    try:
        return environment.from_string(text)
    except Exception as error:  # a text may be anything
        raise errors.ConfigError(
            f"the chat template is not one that can be used: {_shown(error)}; correct"
            " it, or set chat_template_path to another"
        ) from None


def _shown(error: Exception) -> str:
    line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
    return f"{type(error).__name__}{line}: {' '.join(str(error).split())[:300]}"


@functools.cache
def _environment() -> Any:
    # That of Hugging Face's `apply_chat_template`. Only those who have chats import
    # Jinja.
    extras.module("jinja2", extra="tokenizers", otherwise="set use_sft=false")
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """Marks what a `{% generation %}` block renders."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.CallBlock:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body, lineno=line)

        def mark(self, caller: Callable[[], str]) -> str:
            # A block inside of another one is part of it.
            begin, end = _MARKS
            return f"{begin}{_MARK.sub('', caller())}{end}"

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    # Jinja's own escapes HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment


def _refuse(message: object) -> None:
    raise errors.DataError(f"the chat template refuses a conversation: {message}")


def _strftime(date: str, format: str) -> str:
    try:
        day = datetime.date.fromisoformat(date)
    except ValueError:
        raise errors.DataError(
            "the chat template asks for the date of today, with which rows would change"
            f" from day to day, and chat_template_date={date!r} is none; set it to a"
            " fixed one, YYYY-MM-DD"
        ) from None
    return day.strftime(format)


def _without_marks(marked: str) -> Rendered:
    # What comes before a block, and what it renders, in turns.
    pieces = _MARK.split(marked)
    if "".join(_MARK.findall(marked)) != _MARKS * (len(pieces) // 2):
        raise errors.DataError(
            "the chat template cuts what a {% generation %} block renders; put the"
            " block around what is left of it"
        )
    ends = list(itertools.accumulate(map(len, pieces)))
    spans = zip(ends[::2], ends[1::2], strict=False)
    return Rendered(text="".join(pieces), spans=tuple(spans))
