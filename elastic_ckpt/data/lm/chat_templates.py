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
import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import errors, extras, storage
from elastic_ckpt.data.lm import tokenizers

Message = dict[str, Any]

ASSISTANT = "assistant"

_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_FIELD = "chat_template"
# Around what `{% generation %}` blocks render. No message has these halves of pairs.
_MARKS = "\ud800\udbff"
_MARK = re.compile(f"[{_MARKS}]")


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

    def __len__(self) -> int:
        return len(self.text)


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
      ConfigError: if the text is no template, or the date no date.
    """

    text: str
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    date: str = ""

    def __post_init__(self) -> None:
        if self.date and not re.fullmatch(r"\d{4}-\d\d-\d\d", self.date):
            raise errors.ConfigError(
                f"chat_template_date={self.date!r}; write it as YYYY-MM-DD"
            )
        _compiled(self.text)

    def identity(self) -> dict[str, storage.Json]:
        """The digest of the text, and what else it depends on."""
        special = {
            name: text
            for name, text in sorted(self.special_tokens.items())
            if name in self.text
        }
        date = {"date": self.date} if "strftime_now" in self.text else {}
        content = self.text.encode(errors="surrogatepass")
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return {"digest": digest, "special_tokens": special, **date}

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
        _, has_generation = _compiled(self.text)
        if has_generation:
            return whole
        text = whole.text
        turns = []
        for number, message in enumerate(messages):
            if message.get("role") == ASSISTANT:
                before = self._begin(messages[:number], text, prompt=True)
                after = self._begin(messages[: number + 1], text, prompt=False)
                turns.append((before, max(before, after)))
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
        template, _ = _compiled(self.text)
        try:
            marked = template.render(
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
                "the chat template cannot render a conversation:"
                f" {type(error).__name__}: {str(error)[:300]}; correct the template"
                " (chat_template_path in a configuration) or the messages"
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
      text: the template itself.
      path: the path or URI of a file with the template: its text, or, if its name ends
        in `.json`, an object with the field `chat_template`.
      date: see `ChatTemplate`.

    Raises:
      ConfigError: if there is no template, both `text` and `path` are given, or the
        text is no template.
      DataError: if a file cannot be read.
    """
    if text and path:
        raise errors.ConfigError(
            "chat_template and chat_template_path are both set; set one of them"
        )
    if path:
        text = _of_file(storage.absolute(os.path.expanduser(path)))
    of_tokenizer = getattr(tokenizer, "path", "")
    if of_tokenizer and not text:
        text = _beside(epath.Path(of_tokenizer).parent)
    if not text:
        raise errors.ConfigError(
            f"there is no chat template: neither {_FILE} nor the field {_FIELD!r} in"
            f" {_CONFIG_FILE} is beside the tokenizer"
            f" {of_tokenizer or tokenizer!r}; set chat_template_path"
            " to the file of one"
        )
    special: Mapping[str, str] = getattr(tokenizer, "special_tokens", dict)()
    return ChatTemplate(text=text, special_tokens=special, date=date)


def _beside(directory: epath.Path) -> str:
    for name in (_FILE, _CONFIG_FILE):
        if (directory / name).exists():
            return _of_file(directory / name)
    return ""


def _of_file(file: epath.Path) -> str:
    try:
        content = file.read_bytes().decode()
        if file.suffix != ".json":
            return content
        template = json.loads(content).get(_FIELD, "")
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
def _compiled(text: str) -> tuple[Any, bool]:
    # The template, and whether it has `{% generation %}` blocks.
    environment = _environment()
    from jinja2 import nodes

    try:
        tree = environment.parse(text)
        has_generation = tree.find(nodes.ExtensionAttribute) is not None
        return environment.from_string(tree), has_generation
    except Exception as error:  # a text may be anything
        line = getattr(error, "lineno", None)
        place = f", line {line}" if line else ""
        message = str(error).partition("\n")[0]
        raise errors.ConfigError(
            f"the chat template{place} is not one that can be used:"
            f" {type(error).__name__}: {message[:300]}; correct it, or set"
            " chat_template_path to another"
        ) from None


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
    environment.filters["tojson"] = _to_json
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: object) -> None:
    raise errors.DataError(f"the chat template refuses a conversation: {message}")


def _strftime(date: str, format: str) -> str:
    if not date:
        _refuse(
            "it asks for the date of today (strftime_now), with which rows would change"
            " from day to day; set chat_template_date to a fixed one"
        )
    return datetime.date.fromisoformat(date).strftime(format)


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
