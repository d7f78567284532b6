"""Environments that the Dockerfile's own steps build do what both images are for."""

import importlib.metadata
import re
import shutil

import pytest

from tests import runs
from tests.sidecar import image_build, image_work, in_head

pytestmark = pytest.mark.night


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Both images, by the names of their stages."""
    return {
        name: image_build.Image(stage, tmp_path_factory.mktemp("images") / name)
        for name, stage in image_build.stages().items()
    }


def pinned():
    text = (image_build.ROOT / "sidecar" / "constraints.txt").read_text()
    return dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.M))


@pytest.mark.parametrize("name", ["head", "sidecar"])
def test_an_image_has_the_python_and_the_versions_of_the_dockerfile(images, name):
    versions = images[name].versions()
    (base_jax,) = image_build.stages()["sidecar"].jax
    python = image_build.stages()[name].python
    assert versions["python"].startswith(f"{python}.")
    assert versions["jax"] == versions["jaxlib"] == base_jax
    assert versions["elastic-ckpt"] == importlib.metadata.version("elastic-ckpt")
    same = {each.lower().replace("_", "-"): v for each, v in versions.items()}
    here = {each: v for each, v in pinned().items() if each in same}
    assert same.items() >= here.items()


def test_what_both_images_have_is_of_the_same_version(images):
    head, sidecar = images["head"].versions(), images["sidecar"].versions()
    both = head.keys() & sidecar.keys()
    assert {"cloudpickle", "grain", "numpy"} <= both
    assert {each: head[each] for each in both} == {each: sidecar[each] for each in both}


def test_only_the_client_of_the_base_image_is_not_looked_for(images):
    assert images["head"].left_out == []
    (command,) = images["sidecar"].left_out
    assert command.startswith("python -c ")


def test_the_sidecar_reads_batches_and_keeps_steps_in_ram_and_storage(
    images, corpus, tmp_path
):
    sidecar = images["sidecar"]
    assert not {"optax", "orbax-checkpoint"} & sidecar.versions().keys()
    files, read_here = image_work.write(tmp_path, corpus)
    command = image_work.command(sidecar.python, files)
    assert sidecar.run(command, cwd=tmp_path).split() == read_here


def test_the_head_has_its_agents_keep_steps_in_ram_and_storage(images, tmp_path):
    command = [images["head"].python, in_head.__file__, tmp_path]
    tiers = images["head"].run(command, cwd=tmp_path).splitlines()
    assert tiers == ["local", "persistent"]


def test_a_run_of_the_head_goes_on_from_ram_and_from_storage(images, corpus, tmp_path):
    head = images["head"]
    assert "usage: elastic-ckpt" in head.default()
    config = runs.write_config(
        tmp_path,
        corpus,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=str(tmp_path / "memory"),
        local_checkpoint_period=2,
        multi_tier_checkpointing_backup_interval_steps=2,
    )
    for steps in (2, 4, 6):
        if steps == 6:
            shutil.rmtree(tmp_path / "memory")
        head.run(["elastic-ckpt", "train", config, f"steps={steps}"], cwd=tmp_path)
    first, second = runs.events(tmp_path / "tiny", "restored_from")
    assert (first["step"], first["persistent_bytes"]) == (2, 0)
    assert (second["step"], second["local_bytes"]) == (4, 0)
