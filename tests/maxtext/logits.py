"""Computes what MaxText makes of converted checkpoints of `small_models`.

    python -m tests.maxtext.logits DIRECTORY FORM MODEL...

For the environment of MaxText. `DIRECTORY/MODEL/0` is a step that `elastic-ckpt
convert` wrote, loaded as it is; `DIRECTORY/MODEL.npy` has the logits.
"""

import os
import pathlib
import sys

from tests.maxtext import small_models

SETTINGS = {
    "override_model_config": True,
    "weight_dtype": "float32",
    "dtype": "float32",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "log_config": False,
    "attention": "dot_product",
    "matmul_precision": "highest",
    # Those of experts that are not for TPUs.
    "sparse_matmul": False,
    "megablox": False,
    "per_device_batch_size": 1,
    "max_target_length": small_models.TOKENS.shape[1],
}
# By the end of a layout's name: the settings of that form.
FORMS = {"": {}, "_unscanned": {"scan_layers": False}}


def main():
    os.environ |= {"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu"}
    directory, form, *names = sys.argv[1:]
    for name in names:
        logits(pathlib.Path(directory, name), name, FORMS[form])


def logits(path, name, form):
    import maxtext
    import numpy as np
    from maxtext.configs import pyconfig
    from maxtext.utils import model_creation_utils

    keys = {
        **SETTINGS,
        **form,
        **small_models.maxtext_settings(name),
        "run_name": name,
        "base_output_directory": path.parent,
        "load_parameters_path": path / "0" / "items",
    }
    base = pathlib.Path(maxtext.__file__).parent / "configs/base.yml"
    config = pyconfig.initialize(
        ["logits", str(base), *(f"{key}={value}" for key, value in keys.items())]
    )
    model, mesh = model_creation_utils.from_pretrained(config)
    with mesh:
        made = model(
            small_models.TOKENS,
            small_models.POSITIONS,
            decoder_segment_ids=np.ones_like(small_models.TOKENS),
            enable_dropout=False,
        )
    np.save(path.parent / f"{name}.npy", np.asarray(made, np.float32))


if __name__ == "__main__":
    main()
