"""Conversations, from records to rows; chat templates, in a sandbox.

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
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data.lm import chat, chat_templates, pipeline, rows, tokenizers
from tests import worlds
from tests.data.lm import test_tokenizers

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "chat_templates"
CASES = json.loads((GOLDEN / "expected.json").read_text())["cases"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# Ends every line of a conversation, and begins every answer.
LINES = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def template(text, **settings):
    return chat_templates.ChatTemplate(text=text, **settings)


def golden(name):
    return template((GOLDEN / name).read_text(), special_tokens=SPECIAL)


def messages(*contents):
    """Turns of the user and the assistant."""
    roles = ("user", "assistant") * len(contents)
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]


def refused(match):
    return pytest.raises(errors.DataError, match=match)


@pytest.mark.parametrize("case", CASES)
def test_texts_tokens_and_masks_are_those_of_transformers(case):
    made = golden(case["template"])
    tokenizer = tokenizers.load("huggingface", str(GOLDEN / "tokenizer.json"))
    conversations = json.loads((GOLDEN / "conversations.json").read_text())
    element = {"messages": conversations[case["conversation"]]}

    def tokens(**settings):
        reader = chat.Conversations(template=made, tokenizer=tokenizer, **settings)
        return reader.tokens([reader.value(element)])[0]

    turns = chat.Conversations(template=made).messages(element)
    prompt = {"add_generation_prompt": case["add_generation_prompt"]}
    if "error" in case:
        _, _, message = case["error"].partition(": ")
        with refused(re.escape(message[:60])):
            made.render(turns, **prompt)
        return
    assert made.render(turns, **prompt) == case["text"]
    if "tokens" in case:
        assert tokens().tolist() == case["tokens"]
    if "mask" in case:
        masked = tokens(completion_only=True)
        assert (masked >= 0).astype(int).tolist() == case["mask"]
        assert np.where(masked >= 0, masked, ~masked).tolist() == case["tokens"]


def loop(text):
    return "  {% for m in messages %}\n" + text + ".{% endfor %}"


GENERATION = "{% generation %}{{ m.content }}{% endgeneration %}"
MACRO = "{% macro say(m) %}<" + GENERATION + ">{% endmacro %}"
NESTED = loop("{% generation %}[" + GENERATION + "]{% endgeneration %}")
# The first turn of the assistant begins the whole text, but does not end there.
LAST = LINES + "{% if messages[-1].role == 'assistant' %}END{% endif %}"


@pytest.mark.parametrize(
    ("made", "contents", "expected"),
    [
        (golden("chatml.jinja"), "abcd", ["b<|im_end|>\n", "d<|im_end|>\n"]),
        (golden("llama3.jinja"), "abcd", ["b<|eot_id|>", "d<|eot_id|>"]),
        (template(LAST), "ab", ["b\nEND"]),
        (template(MACRO + loop("{{ say(m) }}")), "a", ["a"]),
        (
            template(loop("{% set t %}" + GENERATION + "{% endset %}{{ t }}{{ t }}")),
            "a",
            ["a", "a"],
        ),
        (template(NESTED), "a", ["[a]"]),
    ],
)
def test_what_the_assistant_says_is_found_by_blocks_or_by_rendering_prefixes(
    made, contents, expected
):
    text = made.render_with_spans(messages(*contents))
    assert [text.text[begin:end] for begin, end in text.spans] == expected
    assert text.text == made.render(messages(*contents))


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
    "{{ raise_exception('no\nno') }}": "rejects a conversation: no",
    "{{ strftime_now('%Y') }}": "chat_template_date",
    "{% set t %}{% generation %}a{% endgeneration %}{% endset %}{{ t[1:] }}": "drops",
    "{{ messages|length }}" + LINES: (
        "first 1 messages.*generation.*chat_template_path.*completion_only"
    ),
    LAST: "first 2 messages",
    "\n{{ 'x'|nothing }}": "is invalid.*in line 2: No filter named 'nothing'",
    "{{ " + "(" * 99999 + "1" + ")" * 99999 + " }}": "is invalid.*RecursionError",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_template_that_fails_or_reaches_for_python_is_refused(text):
    match = REFUSED[text]
    error = errors.ConfigError if match.startswith("is invalid") else errors.DataError
    with pytest.raises(error, match=match):
        template(text).render_with_spans(messages(*"abcd"))


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
        with refused("json cannot be read as a chat"):
            chat_templates.load_chat_template(tokenizers.Bytes(), path=config)


def conversation(number):
    """Two or four turns of different lengths, some with a system message."""
    turns = [{"role": "system", "content": "be"}] if number % 5 == 0 else []
    for turn in range(1 + number % 2):
        turns += messages(f"q{number}.{turn}", f"{number}!" * (1 + number * 7 % 4))
    return turns


CONVERSATIONS = [conversation(number) for number in range(60)]


def text_of(numbers):
    return bytes(int(number) - 3 for number in numbers).decode()


def pieces(row):
    """The text of each example in a row, and of it what counts."""
    assert np.array_equal(row["targets"] != 0, row["targets_segmentation"] != 0)
    for segment in range(1, row["inputs_segmentation"].max() + 1):
        inputs = row["inputs"][row["inputs_segmentation"] == segment]
        targets = row["targets"][row["targets_segmentation"] == segment]
        yield text_of(inputs), text_of(targets)


def expected(turns):
    """The text and what counts of a conversation that is not cut."""
    whole = "".join(f"{turn['role'][0]}:{turn['content']}\n" for turn in turns)
    said = [f"{turn['content']}\n" for turn in turns if turn["role"] == "assistant"]
    return whole[:-1], "".join(said)


def masked(record, text=LINES, **settings):
    settings = {"template": template(text), "completion_only": True, **settings}
    conversations = chat.Conversations(**settings)
    (made,) = conversations.tokens([conversations.value(record)])
    assert made.dtype == np.int32
    return made


def test_messages_have_values_of_json_alone_and_whole_characters():
    message = {
        "role": "user",
        "content": "half \ud800",
        "parts": np.array([np.int64(1), 2]),
        "fields": {"a": (None, np.float32(0.5), np.bool_(True))},
        "nothing": None,
    }
    (made,) = chat.Conversations(template=template("")).messages(
        {"messages": [message]}
    )
    assert made == {
        "role": "user",
        "content": "half \ufffd",
        "parts": [1, 2],
        "fields": {"a": [None, 0.5, True]},
    }


@pytest.mark.parametrize(
    ("columns", "record"),
    [
        (("question", "answer"), {"question": b"x", "answer": "yz"}),
        (("answer", "question"), {"question": b"x", "answer": "yz"}),
        (("a", "b"), {"a": messages("x"), "b": "yz"}),
        (("chat",), {"chat": messages("x", "yz")}),
    ],
)
def test_a_conversation_is_messages_or_a_prompt_and_its_completion(columns, record):
    made = masked(record, columns=columns)
    assert text_of(np.where(made < 0, ~made, made)) == "u:x\na:yz\n"
    assert text_of(made[made >= 0]) == "yz\n"


def test_a_conversation_of_which_nothing_counts_makes_no_example():
    for record in (
        {"messages": messages("x")},
        {"messages": None},
        {"prompt": None, "completion": "x"},
    ):
        assert not len(masked(record, columns=tuple(record)))
    # A row of 5 tokens ends before the answer of this one.
    cut = {"messages": messages("x", "yz")}
    assert [len(masked(cut, length=n)) for n in (0, 6, 5)] == [9, 9, 0]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("m.content[0].text", "a"),
        ("m.content | tojson", '[{"text": "a"}]'),
        *(
            (f"m.content{rest}", None)
            for rest in ("", "[0]", "[:1]", " | trim", " ~ 1")
        ),
    ],
)
def test_content_in_parts_is_rendered_by_what_knows_parts_alone(shown, expected):
    parts = [{"role": "user", "content": [{"text": "a"}]}]
    made = template("{% for m in messages %}{{ " + shown + " }}{% endfor %}")
    if expected is not None:
        assert made.render(parts) == expected
        return
    with refused("a list of parts as Python code; use a template that renders"):
        made.render(parts)


@pytest.mark.parametrize("given", [[{"name": "f"}], '[{"name": "f"}]', None, "", []])
def test_a_conversation_is_rendered_with_its_tools(given):
    made = masked(
        {"messages": messages("x", "y"), "tools": given},
        "{% if tools %}{{ tools[0].name }}{% endif %}" + LINES,
    )
    text = text_of(np.where(made < 0, ~made, made))
    assert text == "f" * bool(given) + "u:x\na:y\n"
    assert text_of(made[made >= 0]) == "y\n"


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_a_tokenizer_whose_special_tokens_would_be_text_is_refused(kind, tmp_path):
    tokenizer = tokenizers.load(kind, test_tokenizers.written(tmp_path, kind))
    with pytest.raises(errors.ConfigError, match="template as plain text; use the mo"):
        chat.Conversations(template=template(LINES), tokenizer=tokenizer)


def test_the_text_of_a_special_token_in_a_message_is_warned_of(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(
        chat.logging, "log_first_n", lambda *args: warnings.append(args)
    )
    path = test_tokenizers.written(tmp_path, "huggingface")
    tokenizer = tokenizers.load("huggingface", path)
    for content in ("</s", "a</s>b"):
        masked({"messages": messages(content)}, tokenizer=tokenizer)
    ((_, message, number, text),) = warnings
    assert "which becomes a special token" in message
    assert (number, text) == (1, "</s>")


@pytest.mark.parametrize("packing", ["", rows.FIRST_FIT, rows.BEST_FIT])
def test_rows_have_every_conversation_and_what_counts_of_it(tmp_path, packing):
    # Of the last one, no answer fits into a row.
    table = pa.table({"messages": [*CONVERSATIONS, messages("x" * 70, "y")]})
    pq.write_table(table, tmp_path / "a", row_group_size=7)
    keys = {
        "grain_train_files": tmp_path / "a",
        "grain_file_type": "parquet",
        "train_data_columns": "messages",
        "use_sft": True,
        "sft_train_on_completion_only": True,
        "chat_template": LINES,
        "max_target_length": 64,
        "num_logical_shards": 4,
        "num_epoch": 1,
        "packing": bool(packing),
        "grain_packing_type": packing or "first_fit",
    }
    # Conversations have a worker process unless told otherwise.
    for count, number in ((-1, 1), (2, 2), (0, 0)):
        data = pipeline.from_config(keys, grain_worker_count=count)
        assert data.num_workers == number
    found = []
    for batch in worlds.World(data, 2, 4).rest():
        for number in np.flatnonzero(batch["mask"]):
            found += pieces({name: each[number] for name, each in batch.items()})
    # The last token of a conversation is no input.
    assert sorted(found) == sorted(map(expected, CONVERSATIONS))
