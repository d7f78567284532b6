"""Chat templates render what `transformers` renders, within limits.

`tests/golden/chat_templates` has templates in the style of those of real models, a
tokenizer, and conversations. `expected.json` is what `apply_chat_template` of
transformers 5.24 makes of them, with that `tokenizer.json` in a
`PreTrainedTokenizerFast` whose `bos_token` is `<s>` and `eos_token` `</s>`: the text,
with and without a generation prompt, or the error; and the tokens, with
`return_assistant_tokens_mask` for the template with `{% generation %}` blocks.
"""

import concurrent.futures
import json
import pathlib
import pickle
import re
import threading

import cloudpickle
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import chat, chat_templates, template_sandbox, tokenizers

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "chat_templates"
CONVERSATIONS = json.loads((GOLDEN / "conversations.json").read_text())
CASES = json.loads((GOLDEN / "expected.json").read_text())["cases"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    file.name: chat_templates.ChatTemplate(text=file.read_text(), special_tokens=SPECIAL)
    for file in sorted(GOLDEN.glob("*.jinja"))
}
# Ends every line of a conversation, and begins every answer.
LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def messages(*contents):
    """Turns of the user and the assistant."""
    roles = ("user", "assistant")
    return [
        {"role": roles[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]


def template(text, **settings):
    return chat_templates.ChatTemplate(text=text, **settings)


def rendered(text, turns=(), **settings):
    return template(text, **settings).render(list(turns))


def refused(match):
    return pytest.raises(errors.DataError, match=match)


# As in transformers.


def without_nulls(turns):
    """The messages of a record; a field with null is no field, as there."""
    return chat.Conversations(template=TEMPLATES["chatml.jinja"]).messages(
        {"messages": turns}
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers(name):
    cases = [case for case in CASES if case["template"] == name]
    assert cases
    for case in cases:
        turns = without_nulls(CONVERSATIONS[case["conversation"]])
        prompt = case["add_generation_prompt"]
        if "error" in case:
            kind, _, message = case["error"].partition(": ")
            with refused(re.escape(message[:60])):
                TEMPLATES[name].render(turns, add_generation_prompt=prompt)
            continue
        text = TEMPLATES[name].render(turns, add_generation_prompt=prompt)
        assert text == case["text"], case["conversation"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(name):
    tokenizer = tokenizers.load("huggingface", str(GOLDEN / "tokenizer.json"))
    num_masks = 0
    for case in CASES:
        if case["template"] != name or "tokens" not in case:
            continue
        element = {"messages": CONVERSATIONS[case["conversation"]]}
        every, of_assistant = (
            chat.Conversations(
                template=TEMPLATES[name],
                tokenizer=tokenizer,
                completion_only=completion_only,
            )
            for completion_only in (False, True)
        )
        (tokens,) = every.tokens([every.value(element)])
        assert tokens.tolist() == case["tokens"]
        if "mask" in case:
            (masked,) = of_assistant.tokens([of_assistant.value(element)])
            counts = masked >= 0
            assert counts.astype(int).tolist() == case["mask"]
            assert np.where(counts, masked, ~masked).tolist() == case["tokens"]
            num_masks += 1
    assert num_masks == (8 if name == "qwen.jinja" else 0)
