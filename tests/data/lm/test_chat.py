"""Conversations, from records to rows."""

import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import data_keys, records
from elastic_ckpt.data.lm import chat, chat_templates, pipeline, rows, tokenizers
from tests import worlds

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "chat_templates"
NUM_CONVERSATIONS = 60
LENGTH = 48
SHARDS = 4
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


CONVERSATIONS = [conversation(number) for number in range(NUM_CONVERSATIONS)]


def write(path, records, file_type):
    if file_type == "jsonl":
        lines = [json.dumps(record) + "\n" for record in records]
        path.write_text("".join(lines))
        return str(path)
    table = pa.Table.from_pylist(records)
    if file_type == "parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A file of conversations of each type."""
    directory = tmp_path_factory.mktemp("chats")
    records = [{"messages": turns} for turns in CONVERSATIONS]
    return {
        file_type: write(directory / file_type, records, file_type)
        for file_type in ("arrow", "jsonl", "parquet")
    }


def section(corpus, **settings):
    return data_keys.DataKeys(
        **{
            "grain_train_files": corpus["parquet"],
            "grain_file_type": "parquet",
            "train_data_columns": "messages",
            "use_sft": True,
            "sft_train_on_completion_only": True,
            "chat_template": LINES,
            "max_target_length": LENGTH,
            "num_logical_shards": SHARDS,
            "grain_shuffle_buffer_size": 5,
            "grain_worker_count": 0,
            "num_epoch": 1,
            **settings,
        }
    )


def text_of(numbers):
    return bytes(int(number) - 3 for number in numbers).decode()


def pieces(row):
    """The text of each example in a row, and of it what counts."""
    found = []
    segments = row["inputs_segmentation"]
    for segment in range(1, segments.max() + 1):
        chosen = segments == segment
        whole = text_of(row["inputs"][chosen])
        counts = chosen & (row["targets_segmentation"] == segment)
        assert (row["targets"][chosen & ~counts] == 0).all()
        found.append((whole, text_of(row["targets"][counts])))
    assert not row["targets_segmentation"][segments == 0].any()
    assert not row["inputs"][segments == 0].any()
    return found


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


def test_a_text_of_a_special_token_in_a_message_is_told(monkeypatch):
    told = []
    monkeypatch.setattr(
        chat.logging, "log_first_n", lambda *given: told.append(given[3:])
    )
    tokenizer = tokenizers.load("huggingface", str(GOLDEN / "tokenizer.json"))
    for content in ("no token", "a</s>b"):
        turns = [{"role": "user", "content": "x"}, *conversation(1)]
        turns[0]["content"] = content
        masked({"messages": turns}, tokenizer=tokenizer)
    assert told == [("</s>",)]


def test_a_conversation_that_is_refused_is_named_by_its_record():
    refusing = chat_templates.ChatTemplate(text="{{ raise_exception('no') }}")
    conversations = chat.Conversations(template=refusing)
    element = {"messages": CONVERSATIONS[1]}
    with pytest.raises(errors.DataError, match=r"^record 7: .* refuses"):
        conversations.value({**element, records.RECORD: 7})
    with pytest.raises(errors.DataError, match=r"^the chat template refuses"):
        conversations.value(element)


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
        (("prompt", "completion"), {"prompt": "x", "completion": "yz"}),
        (("completion", "prompt"), {"prompt": "x", "completion": b"yz"}),
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


@pytest.mark.parametrize(
    ("file_type", "packing"),
    [("arrow", ""), ("jsonl", rows.FIRST_FIT), ("parquet", rows.BEST_FIT)],
)
def test_rows_have_every_conversation_and_what_counts_of_it(corpus, file_type, packing):
    data = pipeline.from_config(
        section(
            corpus,
            grain_train_files=corpus[file_type],
            grain_file_type=file_type,
            packing=bool(packing),
            grain_packing_type=packing or "first_fit",
            max_target_length=64,
        )
    )
    found = []
    for batch in worlds.World(data, 2, 4).rest():
        for number in np.flatnonzero(batch["mask"]):
            found += pieces({name: each[number] for name, each in batch.items()})
    # The last token of a conversation is no input.
    assert sorted(found) == sorted(map(expected, CONVERSATIONS))


def test_conversations_have_a_worker_process_unless_told_otherwise(corpus):
    for count, expected in ((-1, 1), (0, 0), (2, 2)):
        data = pipeline.from_config(section(corpus, grain_worker_count=count))
        assert data.num_workers == expected
