"""Reads models that were written back, and compares them with those they come from.

    python -m tests.universal.families.read_models BEFORE AFTER

Both directories have a directory for each model.
"""

import pathlib
import sys

import torch
import transformers


def read(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    """The values of a model that Transformers loads with nothing left over."""
    config = transformers.AutoConfig.from_pretrained(directory)
    (architecture,) = config.architectures
    model, info = getattr(transformers, architecture).from_pretrained(
        directory, output_loading_info=True
    )
    assert not any(info.values()), (directory, info)
    return model.state_dict()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    before, after = map(pathlib.Path, sys.argv[1:])
    for path in sorted(after.iterdir()):
        expected, made = read(before / path.name), read(path)
        assert expected.keys() == made.keys()
        for name, values in expected.items():
            assert made[name].dtype == values.dtype, (path.name, name)
            assert torch.equal(made[name], values), (path.name, name)
