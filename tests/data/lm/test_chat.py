"""Conversations, from records to rows."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import records
from elastic_ckpt.data.lm import chat, chat_templates, pipeline, rows, tokenizers
from tests import worlds
from tests.data.lm import test_tokenizers

LINES = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TEMPLATE = chat_templates.ChatTemplate(text=LINES)


def conversation(number):
    """Two or four turns of different lengths, some with a system message."""
    turns = [{"role": "system", "content": "be"}] if number % 5 == 0 else []
    for turn in range(1 + number % 2):
        question, answer = f"q{number}.{turn}", f"{number}!" * (1 + number * 7 % 4)
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": answer})
    return turns


CONVERSATIONS = [conversation(number) for number in range(60)]


def text_of(numbers):
    return bytes(int(number) - 3 for number in numbers).decode()


def pieces(row):
    """The text of each example in a row, and of it what counts."""
    assert np.array_equal(row["targets"] != 0, row["targets_segmentation"] != 0)
    return [
        (
            text_of(row["inputs"][row["inputs_segmentation"] == segment]),
            text_of(row["targets"][row["targets_segmentation"] == segment]),
        )
        for segment in range(1, row["inputs_segmentation"].max() + 1)
    ]


def expected(turns):
    """The text and what counts of a conversation that is not cut."""
    whole = "".join(f"{turn['role'][0]}:{turn['content']}\n" for turn in turns)
    said = [f"{turn['content']}\n" for turn in turns if turn["role"] == "assistant"]
    return whole[:-1], "".join(said)


def masked(record, **settings):
    settings = {"template": TEMPLATE, "completion_only": True, **settings}
    conversations = chat.Conversations(**settings)
    (made,) = conversations.tokens([conversations.value(record)])
    assert made.dtype == np.int32
    return made


def test_a_conversation_that_is_refused_is_named_by_its_record():
    refusing = chat_templates.ChatTemplate(text="{{ raise_exception('no') }}")
    for record, name in (({}, ""), ({records.RECORD: 7}, "record 7: ")):
        with pytest.raises(errors.DataError, match=f"^{name}the chat template refuses"):
            masked({"messages": CONVERSATIONS[1], **record}, template=refusing)


def test_messages_have_values_of_json_alone_and_whole_characters():
    message = {
        "role": "user",
        "content": "half \ud800",
        "parts": np.array([np.int64(1), 2]),
        "fields": {"a": (None, np.float32(0.5), np.bool_(True))},
        "nothing": None,
    }
    (made,) = chat.Conversations(template=TEMPLATE).messages({"messages": [message]})
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
        (("a", "b"), {"a": [{"role": "user", "content": "x"}], "b": "yz"}),
        (
            ("chat",),
            {
                "chat": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "yz", "name": None},
                ]
            },
        ),
    ],
)
def test_a_conversation_is_messages_or_a_prompt_and_its_completion(columns, record):
    made = masked(record, columns=columns)
    assert text_of(np.where(made < 0, ~made, made)) == "u:x\na:yz\n"
    assert text_of(made[made >= 0]) == "yz\n"


def test_a_conversation_of_which_nothing_counts_makes_no_example():
    for record in (
        {"messages": [{"role": "user", "content": "x"}]},
        {"messages": None},
        {"prompt": None, "completion": "x"},
    ):
        assert not len(masked(record, columns=tuple(record)))


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_a_tokenizer_whose_special_tokens_would_be_text_is_refused(kind, tmp_path):
    tokenizer = tokenizers.load(kind, test_tokenizers.written(tmp_path, kind))
    with pytest.raises(errors.ConfigError, match="would remain plain text; use the mo"):
        chat.Conversations(template=TEMPLATE, tokenizer=tokenizer)


def configured(file, file_type="parquet", **settings):
    listed = [{"messages": turns} for turns in CONVERSATIONS]
    if file_type == "parquet":
        pq.write_table(pa.Table.from_pylist(listed), file, row_group_size=7)
    else:
        file.write_text("".join(json.dumps(each) + "\n" for each in listed))
    return pipeline.from_config(
        grain_train_files=file,
        grain_file_type=file_type,
        train_data_columns="messages",
        use_sft=True,
        sft_train_on_completion_only=True,
        chat_template=LINES,
        max_target_length=64,
        num_logical_shards=4,
        num_epoch=1,
        **settings,
    )


@pytest.mark.parametrize(
    ("file_type", "packing"),
    [("jsonl", ""), ("jsonl", rows.FIRST_FIT), ("parquet", rows.BEST_FIT)],
)
def test_rows_have_every_conversation_and_what_counts_of_it(
    tmp_path, file_type, packing
):
    data = configured(
        tmp_path / "a",
        file_type,
        packing=bool(packing),
        grain_packing_type=packing or "first_fit",
        grain_worker_count=0,
    )
    found = []
    for batch in worlds.World(data, 2, 4).rest():
        for number in np.flatnonzero(batch["mask"]):
            found += pieces({name: each[number] for name, each in batch.items()})
    # The last token of a conversation is no input.
    assert sorted(found) == sorted(map(expected, CONVERSATIONS))


def test_conversations_have_a_worker_process_unless_told_otherwise(tmp_path):
    for count, expected in ((-1, 1), (0, 0), (2, 2)):
        data = configured(tmp_path / "a", grain_worker_count=count)
        assert data.num_workers == expected
