"""Chat templates: what a model's conversations look like as one text.

A template is a program in Jinja that comes with a tokenizer: `chat_template.jinja`, or
the field `chat_template` of `tokenizer_config.json`. It renders what Hugging Face's
`apply_chat_template` renders, from the same variables. As it may be anybody's program,
it runs in a sandbox with limits; see `template_sandbox`.

What the assistant says is found in two ways. If the template has `{% generation %}`
blocks, it is what they render. Otherwise the conversation is also rendered up to each
turn of the assistant, and up to its end: what comes in between is the turn. That
requires each rendering to begin the next one; a template for which this does not hold
is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from etils import epath

from elastic_ckpt.core import errors, extras, storage
from elastic_ckpt.data.lm import tokenizers

Message = dict[str, Any]

ASSISTANT = "assistant"

_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_FIELD = "chat_template"
# The one of several templates that is for conversations without tools.
_DEFAULT = "default"
_LEAST_JINJA = (3, 1, 6)
_HALF = re.compile("[\ud800-\udfff]")
_REMEDY = (
    "mark what the assistant says by {% generation %} ... {% endgeneration %} in a copy"
    " of the template (chat_template_path in a configuration), or train on all turns"
    " (sft_train_on_completion_only=false)"
)


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
        self._compiled()

    @property
    def has_generation(self) -> bool:
        """Whether it marks what the assistant says, by `{% generation %}` blocks."""
        has: bool = self._compiled().has_generation
        return has

    def identity(self) -> dict[str, storage.Json]:
        """The digest of the text, and what else it depends on."""
        used = self._compiled().names
        special = {
            name: text
            for name, text in sorted(self.special_tokens.items())
            if name in used
        }
        date = {"date": self.date} if "strftime_now" in used else {}
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
          DataError: if the template refuses the conversation, has an error, or does not
            end within the limits.
        """
        return self._marked(messages, add_generation_prompt)[0]

    def render_with_spans(self, messages: Sequence[Message]) -> Rendered:
        """A conversation as text, and where the assistant speaks.

        Raises:
          DataError: as `render`; or if the template does not show where it speaks.
        """
        if self.has_generation:
            text, spans = self._marked(messages, False)
            return Rendered(text=text, spans=spans)
        text = self.render(messages)
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
                f" says; {_REMEDY}"
            )
        return len(begin)

    def _compiled(self) -> Any:
        return _compiled(self.text)

    def _marked(
        self, messages: Sequence[Message], add_generation_prompt: bool
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        sandbox = _sandbox()
        variables = {
            **self.special_tokens,
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            marked = self._compiled().render(variables, date=self.date)
        except sandbox.RefusedError as error:
            raise errors.DataError(
                f"the chat template refuses a conversation: {error}"
            ) from None
        except sandbox.ExceededError as error:
            raise errors.DataError(
                f"the chat template was stopped, because {error}; use another one"
                " (chat_template_path in a configuration)"
            ) from None
        except Exception as error:  # a template may raise anything
            raise errors.DataError(
                "the chat template cannot render a conversation:"
                f" {type(error).__name__}: {str(error)[:300]}; correct the template"
                " (chat_template_path in a configuration) or the messages"
            ) from None
        return _spans(marked, sandbox.BEGIN_GENERATED, sandbox.END_GENERATED)


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
    found = find(tokenizer, text=text, path=path)
    if not found:
        raise errors.ConfigError(
            f"there is no chat template: neither {_FILE} nor the field {_FIELD!r} in"
            f" {_CONFIG_FILE} is beside the tokenizer"
            f" {getattr(tokenizer, 'path', '') or tokenizer!r}; set chat_template_path"
            " to the file of one"
        )
    special: Mapping[str, str] = getattr(tokenizer, "special_tokens", dict)()
    return ChatTemplate(text=found, special_tokens=special, date=date)


def find(
    tokenizer: tokenizers.Tokenizer, *, text: str = "", path: epath.PathLike = ""
) -> str:
    """The text of the template that `load_chat_template` loads; empty if none."""
    if text and path:
        raise errors.ConfigError(
            "chat_template and chat_template_path are both set; set one of them"
        )
    if text:
        return text
    if path:
        return _of_file(storage.absolute(os.path.expanduser(path)))
    of_tokenizer = getattr(tokenizer, "path", "")
    return _beside(epath.Path(of_tokenizer).parent) if of_tokenizer else ""


def _of_file(file: epath.Path) -> str:
    content = _read(file)
    if file.suffix != ".json":
        return content
    return _of_settings(file, content)


def _beside(directory: epath.Path) -> str:
    if (directory / _FILE).exists():
        return _read(directory / _FILE)
    file = directory / _CONFIG_FILE
    return _of_settings(file, _read(file)) if file.exists() else ""


def _of_settings(file: epath.Path, content: str) -> str:
    try:
        settings = json.loads(content)
    except ValueError as error:
        raise errors.DataError(
            f"{file}: not JSON ({error}); restore it from a copy"
        ) from None
    template = settings.get(_FIELD, "") if isinstance(settings, dict) else None
    if isinstance(template, list):
        # Several templates by name.
        named = [each for each in template if isinstance(each, dict)]
        template = {each.get("name"): each.get("template") for each in named}.get(
            _DEFAULT, ""
        )
    if not isinstance(template, str):
        raise errors.DataError(
            f"{file}: its field {_FIELD!r} is no text; restore it from a copy, or set"
            " chat_template_path to the file of a template"
        )
    return template


def _read(file: epath.Path) -> str:
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise errors.DataError(
            f"{file}: cannot be read as a chat template ({error}); name a file of text"
            " in Jinja (chat_template_path in a configuration)"
        ) from None


@functools.cache
def _sandbox() -> Any:
    # Jinja is imported by those who have chats.
    extras.module("jinja2", extra="tokenizers", otherwise="set use_sft=false")
    installed = metadata.version("jinja2")
    if tuple(map(int, re.findall(r"\d+", installed)[:3])) < _LEAST_JINJA:
        raise errors.ConfigError(
            f"jinja2 {installed} has known ways out of its sandbox; install 3.1.6 or"
            " newer"
        )
    from elastic_ckpt.data.lm import template_sandbox

    return template_sandbox


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> Any:
    sandbox = _sandbox()
    if len(text) > sandbox.MAX_TEMPLATE_CHARACTERS:
        raise errors.ConfigError(
            f"a chat template of {len(text):,} characters; it may have"
            f" {sandbox.MAX_TEMPLATE_CHARACTERS:,}"
        )
    try:
        return sandbox.Template(text)
    except Exception as error:  # a text may be anything
        line = getattr(error, "lineno", None)
        place = f", line {line}" if line else ""
        message = str(error).partition("\n")[0]
        raise errors.ConfigError(
            f"the chat template{place} is not one that can be used:"
            f" {type(error).__name__}: {message[:300]}; correct it, or set"
            " chat_template_path to another"
        ) from None


def _spans(
    marked: str, begin: str, end: str
) -> tuple[str, tuple[tuple[int, int], ...]]:
    # A text without its marks, and the spans between them; one inside another is part
    # of it.
    pieces, spans = [], []
    length = depth = first = 0
    for piece in re.split(f"([{begin}{end}])", marked):
        if piece == begin:
            first = first if depth else length
            depth += 1
        elif piece == end:
            depth -= 1
            if not depth:
                spans.append((first, length))
            if depth < 0:
                break
        else:
            pieces.append(piece)
            length += len(piece)
    if depth:
        raise errors.DataError(
            "the chat template cuts what a {% generation %} block renders; put the"
            " block around what is left of it"
        )
    text = "".join(pieces)
    if _HALF.search(text):
        raise errors.DataError(
            "the chat template renders halves of surrogate pairs; correct its texts"
        )
    return text, tuple(spans)
