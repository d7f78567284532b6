"""Models of one file, and the command that converts them."""

from elastic_ckpt.cli import main
from tests.universal import safetensors_files


def write(directory, given):
    """Writes a model of one file."""
    directory.mkdir()
    safetensors_files.write(directory / "model.safetensors", given)


def converted(*arguments):
    """The exit status of the command."""
    return main.main(["convert", *map(str, arguments)])


def refusal(capsys, *arguments):
    """What the command writes when it fails."""
    capsys.readouterr()
    assert converted(*arguments) == 1
    return capsys.readouterr().err
