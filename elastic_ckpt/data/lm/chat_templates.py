"""Chat templates: render a model's conversations as text.

A template is written in Jinja and comes with a tokenizer: `chat_template.jinja`, or the
`chat_template` field of `tokenizer_config.json`. It renders the same text as Hugging
Face's `apply_chat_template`, from the same variables. Jinja's sandbox keeps templates
from accessing Python internals but does not limit their time or memory.

If the template has `{% generation %}` blocks, they render the assistant's text.
Otherwise, the conversation is also rendered up to the start and up to the end of each
assistant turn, and the difference is the turn. A template is rejected unless each of
these renderings is a prefix of the whole conversation.
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
# Roles whose text has no loss.
_OTHER_ROLES = {"system", "developer", "user", "tool", "function", "ipython"}

# Template files next to a tokenizer's file, in order of precedence.
_FILES = ("chat_template.jinja", "tokenizer_config.json")
_FIELD = "chat_template"
# Characters that mark the output of `{% generation %}` blocks. Messages do not contain
# half surrogate pairs.
_MARKS = "\ud800\udbff"
_MARK = re.compile(f"[{_MARKS}]")
_GENERATION = re.compile(r"{%[-+]?\s*generation\b")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A conversation as text.

    Attributes:
      text: the whole conversation.
      spans: the start and end, in characters, of each passage by the assistant, in
        ascending order.
    """

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A picklable chat template; `load_chat_template` creates it.

    Attributes:
      text: the Jinja template.
      special_tokens: the text of each of the tokenizer's special tokens, keyed by
        template variable, such as `bos_token`.
      date: the date for `strftime_now`, `YYYY-MM-DD`. Without it, a template that asks
        for today's date is rejected, because rows would change from day to day.

    Raises:
      ConfigError: if the text is not a valid template.
    """

    text: str
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    date: str = ""

    def __post_init__(self) -> None:
        _compiled(self.text)

    def identity(self) -> dict[str, storage.Json]:
        """The template's digest and the variables it reads, other than messages."""
        read = {**self.special_tokens, "strftime_now": self.date}
        return {
            "digest": digest.json_digest(self.text),
            **{name: read[name] for name in sorted(read) if name in self.text},
        }

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """Renders a conversation as text.

        Args:
          messages: dicts of JSON types with `role` and `content`.
          tools: descriptions of the tools that the assistant may call, as JSON types.
          add_generation_prompt: whether to end the text with the beginning of an
            assistant turn.

        Raises:
          DataError: if the template rejects the conversation, has an error, does not
            render tools, or would render lists of content as Python.
        """
        return self._rendered(messages, tools, add_generation_prompt).text

    def render_with_spans(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = ()
    ) -> Rendered:
        """Renders a conversation and finds the assistant's passages.

        Raises:
          DataError: see `render`; also if the template does not show which passages are
            the assistant's, or if the assistant has an unknown role.
        """
        whole = self._rendered(messages, tools, False)
        if _GENERATION.search(self.text):
            return whole
        text, roles = whole.text, [message.get("role") for message in messages]
        if ASSISTANT not in roles and not _OTHER_ROLES.issuperset(roles):
            raise errors.DataError(
                f"a conversation has the roles {sorted({*map(str, roles)})}, but none"
                f" is {ASSISTANT!r}, so none of its tokens would have loss; rename the"
                " assistant's role in the records"
            )
        turns = []
        for number in [n for n, role in enumerate(roles) if role == ASSISTANT]:
            begin = self._begin(messages[:number], tools, text, prompt=True)
            end = self._begin(messages[: number + 1], tools, text, prompt=False)
            turns.append((begin, end))
        return Rendered(text=text, spans=tuple(turns))

    def _begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        text: str,
        *,
        prompt: bool,
    ) -> int:
        # The length of the first messages in the rendered conversation.
        begin = self.render(messages, tools=tools, add_generation_prompt=prompt)
        if not text.startswith(begin):
            raise errors.DataError(
                "the chat template renders the first"
                f" {len(messages)} messages of a conversation differently on their own"
                " than within the whole conversation, so the assistant's text cannot"
                " be found; mark this text with {% generation %} ... {% endgeneration"
                " %} in a copy of the template (chat_template_path in a configuration),"
                " or train on all turns (sft_train_on_completion_only=false)"
            )
        return len(begin)

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any],
        add_generation_prompt: bool,
    ) -> Rendered:
        if tools and "tools" not in self.text:
            raise errors.DataError(
                "a conversation has tools, but the chat template does not render them;"
                " use a template that does (chat_template_path in a configuration), or"
                " drop the field 'tools' from the records"
            )
        try:
            marked = _compiled(self.text).render(
                **self.special_tokens,
                messages=list(messages),
                tools=list(tools) or None,
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
        lists = [m["content"] for m in messages if isinstance(m.get("content"), list)]
        # Jinja renders a list or dict as its `repr`, which would be trained on.
        for part in itertools.chain(lists, *lists):
            is_python = isinstance(part, list | dict) and repr(part) in marked
            if is_python and repr(part) != json.dumps(part, ensure_ascii=False):
                raise errors.DataError(
                    "the chat template renders content that is a list of parts as"
                    " Python code; use a template that renders parts"
                    " (chat_template_path in a configuration), or make each content a"
                    " string"
                )
        return _without_marks(marked)


def load_chat_template(
    tokenizer: tokenizers.Tokenizer,
    *,
    text: str = "",
    path: epath.PathLike = "",
    date: str = "",
) -> ChatTemplate:
    """Loads a chat template: the given one, or the tokenizer's own.

    By default, it looks next to the `tokenizer.json` for `chat_template.jinja`, then
    for the `chat_template` field of `tokenizer_config.json`. If the field lists
    multiple templates, it uses the one named `default`.

    Args:
      tokenizer: the tokenizer, which provides the special tokens and, next to its file,
        the default template.
      text: the template itself, instead of a file.
      path: the path or URI of a file that contains the template text or, if its name
        ends in `.json`, an object with a `chat_template` field.
      date: see `ChatTemplate`.

    Raises:
      ConfigError: if the template is missing or invalid.
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
            f"no chat template was found: neither {_FILES[0]} nor the {_FIELD!r} field"
            f" in {_FILES[1]} exists next to the tokenizer"
            f" {of_tokenizer or tokenizer!r}; set chat_template_path to a template file"
        )
    special_tokens = getattr(tokenizer, "special_tokens", dict)()
    return ChatTemplate(text=text, special_tokens=special_tokens, date=date)


def _of_file(file: epath.Path) -> str:
    try:
        template = file.read_bytes().decode()
        if file.suffix == ".json":
            template = json.loads(template).get(_FIELD, "")
        if isinstance(template, list):
            # The other templates are for conversations with tools.
            named = {each["name"]: each["template"] for each in template}
            template = named.get("default", "")
        if not isinstance(template, str):
            raise TypeError(f"the {_FIELD!r} field is not a string")
        return template
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise errors.DataError(
            f"{file} cannot be read as a chat template ({error}); restore it from a"
            " good copy, or set chat_template_path to a different template file"
        ) from None


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> Any:
    environment = _environment()
    try:
        return environment.from_string(text)
    except Exception as error:  # the text may be anything
        raise errors.ConfigError(
            f"the chat template is invalid: {_shown(error)}; correct it, or set"
            " chat_template_path to a different template file"
        ) from None


def _shown(error: Exception) -> str:
    line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
    return f"{type(error).__name__}{line}: {' '.join(str(error).split())[:300]}"


@functools.cache
def _environment() -> Any:
    # As in Hugging Face's `apply_chat_template`. Jinja is only imported for chats.
    extras.module("jinja2", extra="tokenizers", otherwise="set use_sft=false")
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """Marks the output of a `{% generation %}` block."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.CallBlock:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body, lineno=line)

        def mark(self, caller: Callable[[], str]) -> str:
            # A nested block is part of the outer one.
            begin, end = _MARKS
            return f"{begin}{_MARK.sub('', caller())}{end}"

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    # Jinja's own `tojson` escapes HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment


def _refuse(message: object) -> None:
    raise errors.DataError(f"the chat template rejects a conversation: {message}")


def _strftime(date: str, format: str) -> str:
    try:
        day = datetime.date.fromisoformat(date)
    except ValueError:
        raise errors.DataError(
            "the chat template asks for today's date, so rows would change from day to"
            f" day, but chat_template_date={date!r} is not a date; set"
            " chat_template_date to a fixed date, YYYY-MM-DD"
        ) from None
    return day.strftime(format)


def _without_marks(marked: str) -> Rendered:
    # Alternates between the text before a block and the block's output.
    pieces = _MARK.split(marked)
    if "".join(_MARK.findall(marked)) != _MARKS * (len(pieces) // 2):
        raise errors.DataError(
            "the chat template drops part of the output of a {% generation %} block;"
            " put the block around only the text that remains"
        )
    ends = list(itertools.accumulate(map(len, pieces)))
    spans = zip(ends[::2], ends[1::2], strict=False)
    return Rendered(text="".join(pieces), spans=tuple(spans))
