"""Chat templates render what `transformers` renders, in a sandbox.

`tests/golden/chat_templates` has templates in the style of those of real models, a
tokenizer, and conversations. `expected.json` is what `apply_chat_template` of
transformers 5.24 makes of them, with that `tokenizer.json` in a
`PreTrainedTokenizerFast` whose `bos_token` is `<s>` and `eos_token` `</s>`: the text,
with and without a generation prompt, or the error; and the tokens, with
`return_assistant_tokens_mask` for the template with `{% generation %}` blocks.
"""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.lm import chat, chat_templates, tokenizers

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "chat_templates"
CONVERSATIONS = json.loads((GOLDEN / "conversations.json").read_text())
CASES = json.loads((GOLDEN / "expected.json").read_text())["cases"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    file.name: chat_templates.ChatTemplate(
        text=file.read_text(), special_tokens=SPECIAL
    )
    for file in sorted(GOLDEN.glob("*.jinja"))
}
# Ends every line of a conversation, and begins every answer.
LINES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def messages(*contents):
    """Turns of the user and the assistant."""
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def template(text, **settings):
    return chat_templates.ChatTemplate(text=text, **settings)


def refused(match):
    return pytest.raises(errors.DataError, match=match)


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_tokens_and_masks_are_those_of_transformers(name):
    tokenizer = tokenizers.load("huggingface", str(GOLDEN / "tokenizer.json"))
    every, of_assistant = (
        chat.Conversations(
            template=TEMPLATES[name],
            tokenizer=tokenizer,
            completion_only=completion_only,
        )
        for completion_only in (False, True)
    )
    num_masks = 0
    for case in CASES:
        if case["template"] != name:
            continue
        element = {"messages": CONVERSATIONS[case["conversation"]]}
        turns = every.messages(element)
        prompt = case["add_generation_prompt"]
        if "error" in case:
            _, _, message = case["error"].partition(": ")
            with refused(re.escape(message[:60])):
                TEMPLATES[name].render(turns, add_generation_prompt=prompt)
            continue
        text = TEMPLATES[name].render(turns, add_generation_prompt=prompt)
        assert text == case["text"], case["conversation"]
        if "tokens" not in case:
            continue
        (tokens,) = every.tokens([every.value(element)])
        assert tokens.tolist() == case["tokens"]
        if "mask" in case:
            (masked,) = of_assistant.tokens([of_assistant.value(element)])
            counts = masked >= 0
            assert counts.astype(int).tolist() == case["mask"]
            assert np.where(counts, masked, ~masked).tolist() == case["tokens"]
            num_masks += 1
    assert num_masks == (9 if name == "qwen.jinja" else 0)


def said(made, turns):
    """What the assistant says in a conversation, by its spans."""
    text = made.render_with_spans(turns)
    return [text.text[begin:end] for begin, end in text.spans]


def test_what_the_assistant_says_is_found_by_rendering_prefixes():
    turns = messages("a?", "b!", "c?", "d!")
    for made, end in (
        (TEMPLATES["chatml.jinja"], "<|im_end|>\n"),
        (TEMPLATES["llama3.jinja"], "<|eot_id|>"),
    ):
        assert said(made, turns) == [f"b!{end}", f"d!{end}"]


def test_generation_blocks_count_wherever_they_are():
    block = "{% generation %}{{ m.content }}{% endgeneration %}"
    loop = "  {%% for m in messages %%}\n%s.{%% endfor %%}"
    in_macro = "{% macro say(m) %}<" + block + ">{% endmacro %}" + loop % "{{ say(m) }}"
    captured = loop % ("{% set text %}" + block + "{% endset %}{{ text }}{{ text }}")
    nested = loop % f"{{% generation %}}[{block}]{{% endgeneration %}}"
    for text, expected in (
        (in_macro, ["a"]),
        (captured, ["a", "a"]),
        (nested, ["[a]"]),
    ):
        assert said(template(text), messages("a")) == expected
    assert template(nested).render(messages("a")) == "[a]."


def test_a_template_whose_prefixes_are_none_is_refused():
    numbered = template("{{ messages|length }}" + LINES)
    with refused(r"first 1 messages.*generation.*chat_template_path.*completion_only"):
        numbered.render_with_spans(messages("a", "b"))
    # The first turn of the assistant begins the whole text, but does not end there.
    last = template(LINES + "{% if messages[-1].role == 'assistant' %}END{% endif %}")
    assert said(last, messages("a", "b")) == ["b\nEND"]
    with refused("first 2 messages"):
        last.render_with_spans(messages("a", "b", "c", "d"))


REFUSED = {
    "{{ range(10**9) }}": "Range too big",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "RecursionError",
    "{{ ''.__class__.__mro__ }}": "'__class__'.*unsafe",
    "{{ '{0.__class__.__mro__}'.format(1) }}": "'__class__'.*unsafe",
    "{{ raise_exception.__globals__.os }}": "'__globals__'.*unsafe",
    "{{ strftime_now.func.__globals__.os }}": "'__globals__'.*unsafe",
    "{{ messages.append(1) }}": "'append'.*unsafe",
    "{{ messages[0].content.nothing.more }}": "UndefinedError",
    "{% include '/etc/hostname' %}": "cannot render a conversation",
    "{{ raise_exception('no\nno') }}": "refuses a conversation: no",
    "{{ strftime_now('%Y') }}": "chat_template_date",
    "{% set t %}{% generation %}a{% endgeneration %}{% endset %}{{ t[1:] }}": "cuts",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_template_that_fails_or_reaches_for_python_is_refused(text):
    with refused(REFUSED[text]):
        template(text).render(messages("a"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("\n{{ 'x'|nothing }}", "in line 2: No filter named 'nothing'"),
        ("{{ " + "(" * 99999 + "1" + ")" * 99999 + " }}", "RecursionError"),
    ],
)
def test_what_is_no_template_is_refused(text, match):
    with pytest.raises(errors.ConfigError, match=match):
        template(text)


def test_the_identity_has_what_a_template_reads_beside_messages():
    digests = set()
    for text, read in (
        ("a", {}),
        ("{{ strftime_now('%Y') }}", {"strftime_now": "2026-01-02"}),
        ("{{ bos_token }}", {"bos_token": "<s>"}),
    ):
        made = template(text, special_tokens=SPECIAL, date="2026-01-02").identity()
        digests.add(made.pop("digest"))
        assert made == read
    assert len(digests) == 3


def test_the_template_is_the_given_one_or_that_of_the_tokenizers_files(tmp_path):
    shutil.copy(GOLDEN / "tokenizer.json", tmp_path)

    def load(**settings):
        tokenizer = tokenizers.load("huggingface", str(tmp_path))
        return chat_templates.load_chat_template(tokenizer, **settings)

    config, jinja = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.jinja"
    special = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"}
    several = [{"name": "tool_use", "template": "two"}]
    default = {"name": "default", "template": "three"}
    for field in ({}, {"chat_template": several}):
        config.write_text(json.dumps(field))
        with pytest.raises(errors.ConfigError, match=r"no chat template.*set chat_tem"):
            load()
    for given, expected in (("one", "one"), ([*several, default], "three")):
        config.write_text(json.dumps({"chat_template": given, **special}))
        assert (load().text, load().special_tokens) == (expected, SPECIAL)
    jinja.write_text("four é")
    assert load().text == "four é"
    # A given template comes first.
    assert load(path=config).text == "three"
    assert load(text="given", path=jinja).text == "given"
    for content in ("{", "[]", '{"chat_template": 1}', '{"chat_template": [1]}'):
        config.write_text(content)
        with refused("json: cannot be read as a chat"):
            chat_templates.load_chat_template(tokenizers.load("bytes"), path=config)
