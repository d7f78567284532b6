"""What is built installs without the tests' packages, and runs the first guide."""

import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests import pages

ROOT = pathlib.Path(__file__).parent.parent
GUIDE = ROOT / "docs/pages/guides/own-loop.md"
EXTRAS = """
import importlib.util
import elastic_ckpt as ec
for name in ("adlfs", "gcsfs", "pyarrow", "pytest", "s3fs", "tokenizers"):
    assert importlib.util.find_spec(name) is None, name
open("x.parquet", "w").close()
sources = [ec.data.Parquet(files=("x.parquet",))]
for scheme in ("gs", "s3", "az"):
    sources.append(ec.data.ArrayRecord(files=(scheme + "://bucket/x.array_record",)))
for source in sources:
    try:
        source.index(source.files[0])
    except ec.ElasticCkptError as error:
        print(error)
for scheme in ("gs", "s3"):
    try:
        with ec.Checkpointer([ec.Persistent(scheme + "://bucket/run", every=1)]):
            pass
    except ec.ElasticCkptError as error:
        print(error)
"""

NEEDED = ["parquet", "gcs", "s3", "azure", "gcs", "s3"]


def uv(*words):
    subprocess.run(["uv", *map(str, words)], cwd=ROOT, check=True)


def python_of(version):
    """A Python beside this one (pyenv and uv have them so), or any that uv finds."""
    others = pathlib.Path(sys.base_prefix).parent.glob(f"*{version}.*/bin/python3")
    return next(map(str, sorted(others)), version)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--out-dir", directory)
    return directory


def in_environment(python, directory, program):
    return subprocess.run(
        [python, "-c", program],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        # Neither this checkout nor the settings of these tests are known there.
        env={
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("JAX_", "PYTHON", "VIRTUAL_ENV", "XLA_"))
        }
        | {"JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.night
@pytest.mark.parametrize(("kind", "version"), [("*.whl", "3.11"), ("*.tar.gz", "3.13")])
def test_the_core_runs_the_first_guide_in_a_clean_environment(
    built, tmp_path, kind, version
):
    (package,) = built.glob(kind)
    python = tmp_path / "environment/bin/python"
    uv("venv", "--quiet", "--python", python_of(version), tmp_path / "environment")
    constraints = ("--constraints", ROOT / "constraints.txt")
    uv("pip", "install", "--quiet", "--python", python, *constraints, package)
    page = GUIDE.read_text()
    guide = "\n".join(pages.blocks(page))
    # The guide's last program names a bucket; building its tiers opens nothing.
    ran = in_environment(python, tmp_path, guide)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "".join(pages.blocks(page, "text"))
    refused = in_environment(python, tmp_path, EXTRAS)
    assert refused.returncode == 0, refused.stderr
    for line, extra in zip(refused.stdout.splitlines(), NEEDED, strict=True):
        assert f"'.[{extra}]'" in line, refused.stdout
    console = tmp_path / "environment/bin/elastic-ckpt"
    subprocess.run([console, "--help"], check=True, capture_output=True)


@pytest.mark.night
def test_what_is_built_has_the_types_and_layouts_and_no_tests(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "elastic_ckpt/py.typed" in names
    shipped = {path.name for path in (ROOT / "configs/layouts").glob("*.yml")}
    packed = {name for name in names if name.startswith("elastic_ckpt/universal/la")}
    assert shipped <= {pathlib.PurePath(name).name for name in packed}
    assert not [name for name in names if name.startswith("tests/")]
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        assert not [m.name for m in archive if "/.venv" in m.name or m.size > 2**24]
