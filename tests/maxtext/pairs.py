"""Compares our rows of preference pairs with those of MaxText's own functions.

Without tokens of begin and end: MaxText puts them around each column, we around a
prompt with its response.

    python -m tests.maxtext.pairs FILE

For the environment of MaxText; FILE is Parquet with prompts, chosen and rejected
responses.
"""

import sys

import jax
import numpy as np
import pyarrow.parquet as pq
from maxtext.input_pipeline import dpo_utils, grain_tokenizer, tokenizer

import elastic_ckpt as ec
from elastic_ckpt.integrations import maxtext_preferences
from tests.maxtext import environment

COLUMNS = ("prompt", "chosen", "rejected")
LENGTH, PROMPT_LENGTH = 32, 12


def rows_of_maxtext(path):
    """The features of each pair, as MaxText's pipeline makes them."""
    made = tokenizer.build_tokenizer(
        str(environment.TOKENIZERS / "tokenizer.llama2"),
        "sentencepiece",
        False,
        False,
        "",
    )
    tokenize = grain_tokenizer.TokenizeAndTrim(COLUMNS, LENGTH, made)
    format_pair = dpo_utils.DPODataFormatting(
        pad_id=made.pad_id,
        max_target_length=LENGTH,
        data_column_names=COLUMNS,
        max_prompt_length=PROMPT_LENGTH,
    )
    return [
        format_pair.map(tokenize.map(dict(pair)))
        for pair in pq.read_table(path).to_pylist()
    ]


def our_rows(path):
    """The rows of an epoch."""
    data = ec.data.from_config(
        grain_train_files=path,
        grain_file_type="parquet",
        train_data_columns=",".join(COLUMNS),
        use_dpo=True,
        max_target_length=LENGTH,
        dpo_max_prompt_length=PROMPT_LENGTH,
        tokenizer_type="sentencepiece",
        tokenizer_path=str(environment.TOKENIZERS / "tokenizer.llama2"),
        num_logical_shards=8,
        num_epoch=1,
        add_bos=False,
        add_eos=False,
        packing=False,
    )
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    batches = ec.batches(data, mesh=mesh, spec=jax.P("data"), global_batch_size=8)
    for batch in batches:
        names = maxtext_preferences.FEATURES
        for row in zip(*(batch[name] for name in names), strict=True):
            yield dict(zip(names, row, strict=True))


def text(row):
    """A row to compare, and to sort by; what its padding is does not count."""
    masks = {name: np.asarray(row[f"{name}_mask"], bool) for name in COLUMNS}
    return tuple(
        (tuple(mask), tuple(np.asarray(row[f"{name}_ids"])[mask]))
        for name, mask in masks.items()
    )


def main(path):
    expected = sorted(map(text, rows_of_maxtext(path)))
    actual = sorted(map(text, our_rows(path)))
    assert expected
    assert actual == expected


if __name__ == "__main__":
    main(*sys.argv[1:])
