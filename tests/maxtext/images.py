"""Compares our rows of text and images with those of MaxText's own pipeline.

    python -m tests.maxtext.images DIRECTORY

For the environment of MaxText. It writes files of records into the directory, and
`compared.json`: of each case, by feature, whether what a step is given equals what
MaxText's pipeline makes of the same records, and how large the part of a device is.
"""

import io
import json
import os
import pathlib
import sys

from tests.maxtext import environment

ROWS, DEVICES = 4, 2
NUM_RECORDS, NUM_HELD_OUT = 24, 3
TEXTS = ("prompt", "answer")
# One image of a record, and two.
COLUMNS = {"image": 1, "pair": 2}

SETTINGS = {
    "override_model_config": True,
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_goodput_recording": False,
    "log_config": False,
    "use_sft": True,
    "use_multimodal": True,
    "sft_train_on_completion_only": True,
    "packing": False,
    "train_data_columns": "['prompt','answer']",
    "eval_data_columns": "['question','reply']",
    "eval_image_column": "picture",
    "grain_file_type": "parquet",
    "grain_worker_count": 0,
    "num_epoch": 0,
    "num_logical_shards": ROWS,
}
# By model: of several images in a row, with three positions, and with masks.
MODELS = {
    "gemma3-4b": {
        "tokenizer_type": "sentencepiece",
        "tokenizer": "tokenizer.gemma3",
        "max_target_length": 608,
    },
    "qwen3-vl-2b": {
        "tokenizer_type": "huggingface",
        "tokenizer": "qwen3-tokenizer",
        "max_target_length": 672,
        "scan_layers": False,
    },
    "llama4-17b-16e": {
        "tokenizer_type": "tiktoken",
        "tokenizer": "tokenizer_llama3.tiktoken",
        "max_target_length": 400,
    },
}
_SMALL = {
    "base_emb_dim": 16,
    "base_num_query_heads": 1,
    "base_num_kv_heads": 1,
    "head_dim": 16,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 1,
    "hidden_size_for_vit": 16,
    "intermediate_size_for_vit": 32,
    "num_attention_heads_for_vit": 1,
    "num_hidden_layers_for_vit": 1,
    "scan_layers": False,
    "dtype": "float32",
    "attention": "dot_product",
}
MODEL_COLUMNS = {
    "gemma3-4b": ("image", "pair"),
    "qwen3-vl-2b": ("image",),
    "llama4-17b-16e": ("image",),
}
# Small enough to be trained on a CPU.
SMALL = {
    "gemma3-4b": {
        **_SMALL,
        "max_target_length": 288,
        "patch_size_for_vit": 56,
        "conv_stride_for_vit": 56,
    },
    "qwen3-vl-2b": {
        **_SMALL,
        "max_target_length": 672,
        "deepstack_visual_indexes_for_vit": "[0]",
        "out_hidden_size_for_vit": 16,
        "mrope_section": "[4,2,2]",
        # The logits of a whole batch would take gigabytes.
        "num_vocab_tiling": 8,
    },
}


def settings(model_name):
    """MaxText's keys of a model, with its tokenizer."""
    keys = {"model_name": model_name, **MODELS[model_name]}
    keys["tokenizer_path"] = environment.TOKENIZERS / keys.pop("tokenizer")
    return keys


def records(num_records, *, texts=TEXTS, image="image"):
    """Records with images of noise, of different sizes and modes."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(num_records)

    def png(number):
        height, width = 20 + number % 5, 30 + number % 3
        pixels = noise.integers(0, 256, (height, width, 3)).astype(np.uint8)
        encoded = io.BytesIO()
        shown = Image.fromarray(pixels).convert(("RGB", "RGBA", "L")[number % 3])
        shown.save(encoded, "PNG")
        return encoded.getvalue()

    return [
        {
            texts[0]: f"What is in picture {number}? " * (1 + number % 3),
            texts[1]: f"Noise, number {number}.",
            image: {"bytes": png(number), "path": None},
            "pair": [png(number), png(number + 1)],
        }
        for number in range(num_records)
    ]


def write(directory):
    """Writes records in two formats, and others for evaluation; returns them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tests import corpora

    train = records(NUM_RECORDS)
    held_out = records(NUM_HELD_OUT, texts=("question", "reply"), image="picture")
    for name, elements in (("train", train), ("held_out", held_out)):
        table = pa.Table.from_pylist(elements)
        pq.write_table(table, directory / f"{name}.parquet", row_group_size=5)
    plain = [{**each, "image": each["image"]["bytes"]} for each in train]
    corpora.write_arrayrecord(directory / "train.array_record", plain)
    return train, held_out


def configuration(directory, model_name, column, **more):
    """Of MaxText, and of our data."""
    import maxtext
    from maxtext.configs import pyconfig

    from elastic_ckpt.integrations import maxtext_config

    keys = {
        **SETTINGS,
        **settings(model_name),
        "train_image_column": column,
        "max_num_images_per_example": COLUMNS[column],
        "grain_train_files": directory / "train.parquet",
        "grain_eval_files": directory / "held_out.parquet",
        "run_name": "compared",
        "base_output_directory": directory,
        "per_device_batch_size": ROWS // DEVICES,
        **more,
    }
    shards = keys.pop("num_logical_shards")
    base = pathlib.Path(maxtext.__file__).parent / "configs/base.yml"
    written = (f"{key}={value}" for key, value in keys.items())
    config = pyconfig.initialize(["images", str(base), "dataset_type=grain", *written])
    values = {"num_logical_shards": shards, "grain_record_format": "tf_example"}
    return config, maxtext_config.Own(values=values)


def of_maxtext(config, elements, columns, image_column):
    """The batches that MaxText's own pipeline makes of records, in their order."""
    import grain
    from maxtext.input_pipeline import grain_data_processing

    columns = list(columns)
    picked = [{name: e[name] for name in (*columns, image_column)} for e in elements]
    return iter(
        grain_data_processing.vision_sft_preprocessing_pipeline(
            grain.MapDataset.source(picked), config, columns, image_column
        )
    )


def compared(config, data, elements, columns, image_column, *, num_batches):
    """By feature, whether batches are those of MaxText, and the shapes of its parts."""
    import jax
    import numpy as np

    import elastic_ckpt as ec
    from elastic_ckpt.integrations import maxtext

    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    ours, named = (
        ec.batches(data, mesh=mesh, global_batch_size=ROWS) for _ in range(2)
    )
    of_step = maxtext.MaxTextIterator(ours, elastic=False)
    found = {}
    for _ in range(num_batches):
        batch, of_records = next(of_step), next(named)
        is_real = np.asarray(of_records.get("mask", np.ones(ROWS, bool)))
        # MaxText drops a batch that is not full: its last row stands for the others.
        numbers = np.where(is_real, of_records["record"], 0) % len(elements)
        theirs = next(
            of_maxtext(config, [elements[n] for n in numbers], columns, image_column)
        )
        assert batch.keys() == theirs.keys(), (batch.keys(), theirs.keys())
        for name, value in batch.items():
            host = np.asarray(value)
            same = host.dtype == theirs[name].dtype and host.shape == theirs[name].shape
            same = same and np.array_equal(host[is_real], theirs[name][is_real])
            is_empty = not host[~is_real].any()
            parts = {shard.data.shape for shard in value.addressable_shards}
            is_equal = same and is_empty and found.get(name, (True,))[0]
            found[name] = (is_equal, sorted(parts))
    ours.close()
    named.close()
    return found


def main():
    directory = pathlib.Path(sys.argv[1])
    os.environ |= {
        "DECOUPLE_GCLOUD": "TRUE",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    from elastic_ckpt.data.lm import pipeline
    from elastic_ckpt.integrations import maxtext_config, maxtext_images, maxtext_seam

    maxtext_seam.check_installed()
    train, held_out = write(directory)
    found = {}

    def of_training(name, model_name, column, **more):
        config, own = configuration(directory, model_name, column, **more)
        section = maxtext_config.train_section(config, own)
        rows = maxtext_images.from_config(config, section)
        data = pipeline.from_rows(section, rows)
        # MaxText itself reads images of Parquet files alone.
        of_parquet, _ = configuration(directory, model_name, column)
        found[name] = compared(of_parquet, data, train, TEXTS, column, num_batches=2)

    for model_name, columns in MODEL_COLUMNS.items():
        for column in columns:
            of_training(f"{model_name} {column}", model_name, column)
    of_training(
        "array_record",
        "llama4-17b-16e",
        "image",
        grain_train_files=directory / "train.array_record",
        grain_file_type="arrayrecord",
    )
    of_training("worker", "llama4-17b-16e", "image", grain_worker_count=1)
    config, own = configuration(directory, "llama4-17b-16e", "image", eval_interval=1)
    section = maxtext_config.eval_section(config, own)
    rows = maxtext_images.from_config(config, section, evaluation=True)
    found["evaluation"] = compared(
        config,
        pipeline.eval_from_config(section, global_batch_size=ROWS, rows=rows),
        held_out,
        ("question", "reply"),
        "picture",
        num_batches=1,
    )
    (directory / "compared.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
