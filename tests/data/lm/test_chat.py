"""Conversations and preference pairs, from records to rows."""

import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers as hf
from absl import logging

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    data_keys,
    mixing,
    records,
    shuffling,
    tokens,
)
from elastic_ckpt.data.lm import (
    chat,
    chat_templates,
    language,
    pipeline,
    token_blocks,
    tokenizers,
)
from elastic_ckpt.data.sources import lines
from tests import formats, worlds
from tests.data.lm import test_tokenizers

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
            **settings,
        }
    )


def encoded(text):
    return tokenizers.Bytes().encode(text).tolist()


def text_of(numbers):
    return bytes(int(number) - 3 for number in numbers).decode()


def refused(match, error=errors.DataError):
    return pytest.raises(error, match=match)


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


# Tokens of a conversation.


def masked(record, **settings):
    settings = {"template": TEMPLATE, "completion_only": True, **settings}
    conversations = chat.Conversations(**settings)
    (made,) = conversations.tokens([conversations.value(record)])
    assert made.dtype == np.int32
    return made


def test_tokens_that_do_not_count_are_kept_as_complements():
    turns = CONVERSATIONS[1]
    whole, said = expected(turns)
    made = masked({"messages": turns})
    counts = made >= 0
    assert text_of(np.where(counts, made, ~made)) == whole + "\n"
    assert text_of(made[counts]) == said
    every = masked({"messages": turns}, completion_only=False)
    assert text_of(every) == whole + "\n"


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
    "record",
    [
        {"messages": None},
        {"messages": [{"role": "user", "content": "nobody answers"}]},
    ],
)
def test_a_conversation_in_which_nothing_counts_has_no_tokens(record):
    assert masked(record).tolist() == []


# Tokens of a tokenizer.json.


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.load("huggingface", str(GOLDEN / "tokenizer.json"))


def names(tokenizer, made):
    """The texts of tokens, and whether each counts."""
    library = hf.Tokenizer.from_file(tokenizer.path)
    return [(library.id_to_token(int(max(n, ~n))), bool(n >= 0)) for n in made]


def test_special_tokens_are_those_of_the_template_and_never_doubled(tokenizer):
    text = (GOLDEN / "llama3.jinja").read_text()
    template = chat_templates.load_chat_template(tokenizer, text=text)
    assert template.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    record = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
        ]
    }
    made = names(tokenizer, masked(record, template=template, tokenizer=tokenizer))
    texts = [text for text, _ in made]
    assert texts.count("<s>") == 1
    assert texts[0] == "<s>"
    assert made[-2:] == [("b", True), ("<|eot_id|>", True)]
    assert "</s>" not in texts


def test_the_text_of_a_special_token_in_a_message_becomes_the_token(
    tokenizer, monkeypatch
):
    warnings = []
    monkeypatch.setattr(
        logging, "log_first_n", lambda _, *message: warnings.append(message)
    )
    turns = [{"role": "user", "content": "s"}, {"role": "assistant", "content": "b"}]
    masked({"messages": turns}, tokenizer=tokenizer)
    assert not warnings
    turns[0]["content"] = "</s>"
    made = names(tokenizer, masked({"messages": turns}, tokenizer=tokenizer))
    assert ("</s>", False) in made
    ((message, number, text),) = warnings
    assert "becomes a special token" in message
    assert (number, text) == (1, "</s>")


def test_a_tokenizer_without_special_tokens_in_texts_is_refused(tmp_path):
    for kind in ("sentencepiece", "tiktoken"):
        tokenizer = tokenizers.load(kind, test_tokenizers.written(tmp_path, kind))
        with refused("would remain plain text", errors.ConfigError):
            chat.Conversations(template=TEMPLATE, tokenizer=tokenizer)


# Rows.


def rows_of(corpus, packing, *, of_blocks, truncate=False, window=3, epochs=1):
    """The rows of a shard, made of blocks or of single examples."""
    source = lines.JsonLines(files=(corpus["jsonl"],), columns=("messages",))
    read = records.Records(
        source,
        shard=1,
        num_shards=SHARDS,
        read_options=records.ReadOptions(num_epochs=epochs, shuffle_seed=3),
    )
    documents = chat.Conversations(template=TEMPLATE, completion_only=True)
    mixed = mixing.Mixture(
        {"chats": token_blocks.Tokens(read, documents=documents)},
        {"chats": 1.0},
        shard=1,
    )
    examples = language.Examples(mixed, length=LENGTH, truncate=truncate)
    if window:
        examples = shuffling.WindowShuffle(examples, window_size=window, seed=7)
    if not of_blocks:
        examples = formats.Single(examples)
    if packing:
        rows = language.packed(examples, packing=packing, length=LENGTH, seed=11)
    else:
        rows = language.Padded(examples, length=LENGTH)
    return chat.MaskedTargets(rows)


def content(row):
    return {name: (each.dtype, each.tolist()) for name, each in row.items()}


@pytest.mark.parametrize(
    ("packing", "truncate"),
    [("", True), *((packing, False) for packing in language.PACKINGS)],
)
def test_rows_of_blocks_are_those_of_single_examples_from_every_state(
    corpus, packing, truncate
):
    ours, theirs = (
        rows_of(corpus, packing, of_blocks=of_blocks, truncate=truncate)
        for of_blocks in (True, False)
    )
    # Only rows of blocks have it.
    assert hasattr(iter(ours), "mark")
    assert not hasattr(iter(theirs), "mark")
    expected_rows = [content(row) for row in theirs]
    assert len(expected_rows) > 5
    iterator = iter(ours)
    for number in range(len(expected_rows)):
        saved = json.loads(json.dumps(iterator.get_state()))
        assert saved == json.loads(json.dumps(iterator.mark()()))
        for dataset in (ours, theirs):
            resumed = iter(dataset)
            resumed.set_state(json.loads(json.dumps(saved)))
            assert content(next(resumed)) == expected_rows[number]
        assert content(next(iterator)) == expected_rows[number]
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize(
    ("file_type", "packing"),
    [("arrow", ""), ("jsonl", language.FIRST_FIT), ("parquet", language.BEST_FIT)],
)
def test_rows_have_every_conversation_and_what_counts_of_it(corpus, file_type, packing):
    data = pipeline.from_config(
        section(
            corpus,
            grain_train_files=corpus[file_type],
            grain_file_type=file_type,
            num_epoch=1,
            packing=bool(packing),
            grain_packing_type=packing or "first_fit",
            max_target_length=64,
        )
    )
    found = []
    for batch in worlds.World(data, 1, 4).rest():
        for number in np.flatnonzero(batch["mask"]):
            found += pieces({name: each[number] for name, each in batch.items()})
    # The last token of a conversation is no input.
    assert sorted(found) == sorted(map(expected, CONVERSATIONS))


def test_concatenated_rows_count_what_counts_in_whole_conversations(corpus):
    data = pipeline.from_config(
        section(
            corpus,
            num_epoch=1,
            packing=True,
            grain_packing_type="concat_then_split",
            use_truncation=False,
        )
    )
    counted, inputs = 0, 0
    for batch in worlds.World(data, 1, 4).rest():
        counted += int((batch["targets_segmentation"] > 0).sum())
        inputs += int((batch["inputs_segmentation"] > 0).sum())
    wholes = [expected(turns) for turns in CONVERSATIONS]
    assert inputs == sum(len(whole) for whole, _ in wholes)
    assert counted == sum(len(said) for _, said in wholes)


@pytest.mark.parametrize("packing", ["", language.CONCAT_THEN_SPLIT])
def test_batches_are_the_same_on_any_number_of_hosts(corpus, packing):
    settings = {
        "packing": bool(packing),
        "grain_packing_type": packing or "first_fit",
        "use_truncation": False,
    }
    data = pipeline.from_config(section(corpus, **settings))
    one = worlds.World(data, 1, 8)
    saved = one.save()
    for num_hosts in (2, 4, 1, 2):
        world = worlds.World(
            pipeline.from_config(section(corpus, **settings)), num_hosts, 8
        )
        world.load(saved)
        for _ in range(4):
            assert worlds.content(world.batch()) == worlds.content(one.batch())
        saved = world.save()


def test_an_error_of_a_template_is_raised_when_its_conversation_is_due(tmp_path):
    good, bad = conversation(1), [{"role": "tool", "content": "x"}]
    records_of = [{"messages": turns} for turns in (good, good, bad, good)]
    file = write(tmp_path / "a", records_of, "jsonl")
    refused_role = "{% if messages[0].role == 'tool' %}"
    refusing = refused_role + "{{ raise_exception('no tools') }}{% endif %}"
    data = pipeline.from_config(
        section(
            {"parquet": file},
            grain_file_type="jsonl",
            num_logical_shards=1,
            enable_data_shuffling=False,
            chat_template=LINES + refusing,
        )
    )
    rows = iter(data.make_shard(0))
    assert pieces(next(rows)) == pieces(next(rows)) == [expected(good)]
    for _ in range(2):
        with refused("record 2: the chat template refuses a conversation: no tools"):
            next(rows)


def test_the_identity_has_the_template_and_the_mask(corpus):
    plain = pipeline.from_config(section(corpus)).identity()
    assert json.loads(json.dumps(plain)) == plain

    def differing(**settings):
        other = pipeline.from_config(section(corpus, **settings)).identity()
        return {key for key in plain if plain[key] != other.get(key)}

    assert differing() == set()
    # What has no effect on a conversation.
    assert differing(add_bos=False, add_eos=False) == set()
    assert differing(chat_template_date="2026-01-02") == set()
    assert differing(chat_template=LINES + " ") == {"chat_template"}
    assert differing(sft_train_on_completion_only=False) == {
        "sft_train_on_completion_only"
    }


def test_a_resume_with_another_template_is_refused(corpus, tmp_path):
    world = worlds.World(pipeline.from_config(section(corpus)), 1, 4)
    world.batch()
    world.write(tmp_path)
    changed = pipeline.from_config(section(corpus, chat_template=LINES + " "))
    with refused("chat_template: saved .*digest.*now"):
        worlds.World(changed, 1, 4).read(tmp_path)
    same = worlds.World(pipeline.from_config(section(corpus)), 2, 4)
    same.read(tmp_path)
    assert worlds.content(same.batch()) == worlds.content(world.batch())


# Preference pairs.


def pair_record(number):
    return {
        "prompt": f"question {number} " * (1 + number % 3),
        "chosen": f"yes {number}!" * (1 + number % 4),
        "rejected": f"no {number}" if number % 7 else None,
    }


PAIRS = [pair_record(number) for number in range(40)]


def pair_section(tmp_path, **settings):
    file = write(tmp_path / "pairs", PAIRS, "parquet")
    return section(
        {"parquet": file},
        **{
            "use_sft": False,
            "use_dpo": True,
            "sft_train_on_completion_only": False,
            "chat_template": "",
            "train_data_columns": "prompt,chosen,rejected",
            "dpo_max_prompt_length": 30,
            **settings,
        },
    )


def unpadded(row, name):
    ids, mask = row[f"{name}_ids"], row[f"{name}_mask"]
    assert not ids[mask == 0].any()
    # Padding is before a prompt, and after a response.
    order = np.sort(mask) if name == "prompt" else np.sort(mask)[::-1]
    np.testing.assert_array_equal(mask, order)
    return ids[mask == 1].tolist()


def test_rows_of_pairs_have_both_responses_with_maxtexts_names(tmp_path):
    data = pipeline.from_config(pair_section(tmp_path, num_epoch=1))
    found = []
    for batch in worlds.World(data, 1, 4).rest():
        assert batch["prompt_ids"].shape == (4, 30)
        assert batch["chosen_ids"].shape == batch["rejected_ids"].shape == (4, 18)
        for number in np.flatnonzero(batch["mask"]):
            row = {name: each[number] for name, each in batch.items()}
            found.append(tuple(unpadded(row, name) for name in chat.Pair._fields))
    wanted = [
        (
            [tokens.BEGIN, *encoded(record["prompt"])][-30:],
            [*encoded(record["chosen"]), tokens.END][:18],
            [*encoded(record["rejected"]), tokens.END][:18],
        )
        for record in PAIRS
        if record["rejected"] is not None
    ]
    assert sorted(found) == sorted(wanted)
