"""The shipped layouts of MaxText, by its logits."""

import json

import numpy as np
import pytest

from elastic_ckpt.cli import main
from tests.maxtext import environment, small_models
from tests.universal import safetensors_files

pytestmark = pytest.mark.night

# Of Hugging Face's Transformers, by `hf_logits`.
HF_LOGITS = environment.ROOT / "tests/golden/hf_logits.npz"


@pytest.mark.parametrize("form", ["", "_unscanned"])
def test_maxtext_computes_the_logits_of_hugging_face(tmp_path, form):
    environment.set_up()
    for name, model in small_models.MODELS.items():
        source = tmp_path / "hf" / name
        source.mkdir(parents=True)
        config = json.dumps(small_models.hf_config(name))
        (source / "config.json").write_text(config)
        tensors = small_models.tensors(name)
        safetensors_files.write(source / "model.safetensors", tensors)
        given = [source, tmp_path / name / "0", "--rules", model.layout + form]
        for size, number in model.sizes.items():
            given += ["--size", f"{size}={number}"]
        assert main.main(["convert", *map(str, given)]) == 0
    environment.run("tests.maxtext.logits", tmp_path, form, *small_models.MODELS)
    for name, expected in np.load(HF_LOGITS).items():
        # Either side may have padding.
        made = np.load(tmp_path / f"{name}.npy")[..., : small_models.VOCAB]
        expected = expected[..., : small_models.VOCAB]
        np.testing.assert_allclose(made, expected, rtol=0, atol=5e-4, err_msg=name)
