"""Images in a stand-in for MaxText; `tests.maxtext.test_images` has MaxText's own."""

import json
import re

import numpy as np
import pytest

from elastic_ckpt.cli import main
from elastic_ckpt.core import errors
from elastic_ckpt.integrations import maxtext, maxtext_images
from tests import corpora
from tests.data.lm import test_tokenizers
from tests.integrations import stand_in
from tests.integrations.test_maxtext import (  # noqa: F401
    arguments,
    equal,
    install,
    no_maxtext_or_logging_is_left,
    trained,
)

SHOWN = {
    "use_sft": True,
    "use_multimodal": True,
    "sft_train_on_completion_only": True,
    "packing": False,
    "train_data_columns": "['prompt','answer']",
    "eval_data_columns": "['prompt','answer']",
    "tokenizer_type": "huggingface",
    "max_num_images_per_example": 2,
}


def element(number):
    """A record with two images; each value of it contains its number."""
    return {
        "prompt": f"what is {number}? ",
        "answer": f"it is {number}",
        "image": [bytes([1 + number, 7, 9]), bytes([100 + number])],
        "single": bytes([1 + number]),
    }


@pytest.fixture
def files(tmp_path):
    corpora.write_arrayrecord(tmp_path / "texts", [element(n) for n in range(40)])
    corpora.write_arrayrecord(tmp_path / "held_out", [element(n) for n in range(5)])
    (tmp_path / "tokenizer.json").write_text(
        test_tokenizers.huggingface_tokenizer().to_str()
    )
    return tmp_path


def shown(files, **settings):
    """Arguments of a run with images."""
    return SHOWN | {"tokenizer_path": f"{files}/tokenizer.json"} | settings


def numbers(batch):
    """The number of the record of each row, by its first image and by its text."""
    rows = len(batch["inputs"])
    of_images = batch["images"].reshape(rows, -1, 5)[:, 0, 0].astype(int) - 1
    of_text = [
        int(re.search(r"is (\d+)", bytes(row.astype(np.uint8)).decode())[1])
        for row in batch["inputs"]
    ]
    return of_images.tolist(), of_text


def test_a_step_gets_the_images_of_its_rows(install, files):  # noqa: F811
    install()
    batches = trained(files, **shown(files, steps=5, enable_data_shuffling=False))
    seen = []
    for batch in batches:
        assert batch.keys() == {*maxtext.FEATURES, "images"}
        assert (batch["images"].shape, batch["images"].dtype) == ((8, 2, 5), np.float32)
        of_images, of_text = numbers(batch)
        assert of_images == of_text
        seen += of_text
        second = batch["images"][:, 1, 0]
        np.testing.assert_array_equal(second, np.array(of_text) + 100)
        # The functions of a batch were applied, too.
        np.testing.assert_array_equal(batch["targets"][:, :-1], batch["inputs"][:, 1:])
    # Each record once in an epoch.
    assert sorted(seen) == list(range(40))


def test_models_whose_images_are_rows_get_one_for_each_row(
    install,  # noqa: F811
    files,
    capsys,
):
    install()
    model = {"model_name": "qwen3-vl-2b", "steps": 1}
    one = shown(files, train_image_column="single", **model)
    (batch,) = trained(files, **one)
    assert batch["images"].shape == (8, 5)
    of_images, of_text = numbers(batch)
    assert of_images == of_text
    # MaxText's step would take the first eight images for those of its rows.
    two = shown(files, checkpoint_dir=f"{files}/two", **model)
    trained(files, code=1, **two)
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert re.search("what is .* it has 2 images, and .* write one image into", line)


@pytest.mark.slow
@pytest.mark.parametrize("in_sidecar", [False, True])
def test_it_continues_with_the_same_rows_and_an_audit_reads_them_again(
    install,  # noqa: F811
    files,
    capsys,
    in_sidecar,
):
    install()
    run = f"{files}/runs/{stand_in.FIELDS['run_name']}"
    place = {
        "colocated_python_data_input": in_sidecar,
        "checkpoint_dir": f"{run}/checkpoints",
    }
    whole = trained(files, **shown(files, steps=6, run_name="whole"))
    assert equal(trained(files, **shown(files, steps=2, **place)), whole[:2])
    assert equal(trained(files, **shown(files, steps=6, **place)), whole[2:])
    capsys.readouterr()
    assert main.main(["audit", run, "--json"]) == 0
    audited = json.loads(capsys.readouterr().out)
    assert audited["num_row_identical_steps"] == audited["num_steps"] == 6
    # It names the record of each row.
    assert main.main(["audit", run, "--step", "1"]) == 0
    named = re.findall(r"row \d: texts:(\d+), ", capsys.readouterr().out)
    assert list(map(int, named)) == numbers(whole[1])[1]


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"train_image_column": "single"}, "train_image_column"),
        ({"train_data_columns": "['answer','prompt']"}, "train_data_columns"),
        ({"max_target_length": 23}, "max_target_length"),
        ({"model_name": "gemma3-12b"}, "model_name"),
        ({"image_placeholder": "<x>"}, "image_placeholder"),
        ({"max_num_images_per_example": 3}, "max_num_images_per_example"),
    ],
)
def test_it_does_not_continue_with_other_rows(
    install,  # noqa: F811
    files,
    capsys,
    settings,
    changed,
):
    install()
    trained(files, **shown(files, steps=2))
    capsys.readouterr()
    trained(files, code=1, **shown(files, steps=4, **settings))
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"another pipeline \(.*{changed}: saved ", line)


def test_its_evaluation_has_columns_of_its_own(install, files):  # noqa: F811
    install()
    of_eval = {
        "eval_interval": 1,
        "eval_image_column": "single",
        "grain_eval_files": f"{files}/held_out",
    }
    (_, batch) = trained(files, **shown(files, steps=1, **of_eval))
    assert batch["images"].shape == (8, 1, 5)
    is_real = batch["inputs_segmentation"].any(axis=1)
    assert is_real.sum() == 5
    assert not batch["images"][~is_real].any()
    real = {name: value[is_real] for name, value in batch.items()}
    assert numbers(real) == (list(range(5)), list(range(5)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing": True}, "packing=true: set it to false, for each record has a row"),
        (
            {"sft_train_on_completion_only": False},
            "sft_train_on_completion_only=false: set it to true",
        ),
        ({"tokenize_train_data": False}, "tokenize_train_data=false: set it to true"),
        ({"tokenizer_type": "bytes"}, "tokenizer_type=bytes: MaxText makes the tokens"),
        ({"grain_record_format": "bytes"}, "grain_record_format=bytes: .*tf_example"),
        ({"grain_file_type": "text"}, "grain_file_type=text: .* such as parquet"),
        (
            {"train_data_columns": "['prompt']"},
            r"train_data_columns=\['prompt'\]: .* two columns, of the prompt and of",
        ),
        (
            {"eval_interval": 1, "eval_data_columns": "['text']"},
            r"eval_data_columns=\['text'\]: .* two columns",
        ),
    ],
)
def test_keys_that_do_not_fit_to_images_are_one_line(
    install,  # noqa: F811
    files,
    capsys,
    settings,
    message,
):
    install()
    given = arguments(files, **shown(files, **settings))
    assert main.main(given) == errors.CONFIG_EXIT_CODE
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"image": "cat.png"}, "'image' has a str, not the bytes of an image file"),
        ({"image": {"bytes": None, "path": "a"}}, "'image' has a NoneType, not the"),
        ({"image": []}, "'image' has a list, not the bytes of an image file"),
        ({"prompt": None}, "'prompt' has a NoneType, not text"),
        (
            {"image": 3 * [b"a"]},
            "no row of the record whose prompt begins 'what is 3\\? ': 3 images",
        ),
    ],
)
def test_a_record_of_which_no_row_can_be_made_is_named(
    install,  # noqa: F811
    value,
    message,
):
    install()
    keys = {
        "max_num_images_per_example": 2,
        "max_target_length": 24,
        "model_name": "gemma3-4b",
        "train_data_columns": ["prompt", "answer"],
        "train_image_column": "image",
    }
    rows = maxtext_images.ImageRows(keys=json.dumps(keys))
    assert rows.columns == ("prompt", "answer", "image")
    assert rows.row(element(3))["images"].shape == (2, 5)
    with pytest.raises(errors.DataError, match=message):
        rows.row(element(3) | value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("data_columns, image", "columns, image"), "calls .*vision_sft_preprocessing"),
        (
            ("most=config.max_num_images_per_example", "most=config.dropout_rate"),
            "reads its key dropout_rate, which elastic_ckpt does not know",
        ),
        (("dataset = dataset.batch(", "made = dict(size="), "makes no batch in vision"),
    ],
)
def test_a_maxtext_that_makes_rows_in_another_way_is_refused(
    install,  # noqa: F811
    files,
    capsys,
    change,
    message,
):
    install(grain_data_processing=change)
    assert main.main(arguments(files, **shown(files))) == errors.CONFIG_EXIT_CODE
    assert re.search(message, capsys.readouterr().err)


def test_text_alone_for_a_multimodal_model_is_as_for_any_other(install, files):  # noqa: F811
    install()
    texts = {"train_data_columns": "['prompt']", "steps": 2}
    expected = trained(files, checkpoint_dir=f"{files}/other", **texts)
    batches = trained(files, use_multimodal=True, **texts)
    assert batches[0].keys() == set(maxtext.FEATURES)
    assert equal(batches, expected)
