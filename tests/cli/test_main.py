import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from elastic_ckpt.cli import main
from elastic_ckpt.data.sources import arrayrecord, parquet
from elastic_ckpt.training import load
from tests import runs


def test_help_of_train_imports_no_heavy_library():
    program = (
        "import sys\n"
        "from elastic_ckpt.cli import main\n"
        "try: main.main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'jax', 'grain', 'orbax', 'optax'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    text = ended.stdout
    assert text.endswith("[]\n")
    assert "elastic-ckpt train configs/demo_cpu.yml slices=2 hosts=2 steps=190" in text
    assert "elastic-ckpt config    # every key with its default and meaning" in text


def test_config_verb_prints_what_would_run_and_where_it_is_set(tmp_path):
    (tmp_path / "base.yml").write_text("steps: 5\nhosts: 2\n")
    file = tmp_path / "run.yml"
    file.write_text("base_config: base.yml\nhosts: 4\nrun_name: a\n")
    given = [file, "packing=true", "learning_rate=1e-3"]
    text = runs.verb("config", *given)
    assert f"\nsteps: 5  # {tmp_path}/base.yml, line 1\n" in text
    assert f"\nhosts: 4  # {tmp_path}/run.yml, line 2\n" in text
    assert "\npacking: true  # command line, 'packing=true'\n" in text
    assert "\nslices: 1\n" in text
    # The output is a configuration, and the same one.
    again = tmp_path / "again.yml"
    again.write_text(text)
    assert load.load(again) == load.load(file, given[1:])


def test_without_a_file_the_config_verb_prints_every_key_with_its_meaning():
    assert runs.verb("config") == load.base_yaml()


@pytest.mark.slow
def test_wheel_alone_runs_a_file_that_builds_on_the_defaults(tmp_path):
    uv, site = shutil.which("uv"), tmp_path / "site"
    build = [uv, "build", "--quiet", "--wheel", "--out-dir", tmp_path, runs.ROOT]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    files = [path.relative_to(site) for path in site.rglob("*") if path.is_file()]
    # Packages alone: what images are built of stays in the source tree.
    info = {path.parts[0] for path in files if path.parts[0].endswith(".dist-info")}
    assert {path.parts[0] for path in files} - info == {
        "elastic_ckpt",
        "elastic_ckpt_sidecar",
    }
    assert site / "elastic_ckpt_sidecar" / "remote_iterator.py" in site.rglob("*.py")
    assert not [path for path in files if "Dockerfile" in path.name]
    (tmp_path / "run.yml").write_text("base_config: base.yml\nhosts: 4\n")
    program = (
        "import elastic_ckpt, sys\n"
        "from elastic_ckpt.cli import main\n"
        "print(elastic_ckpt.__file__)\n"
        "sys.exit(main.main(['config', 'run.yml']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(str(site))
    assert "\nhosts: 4  # run.yml, line 2\n" in ended.stdout
    assert "\nslices: 1\n" in ended.stdout


def test_interrupted_verb_says_so_and_returns_130(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("elastic_ckpt.data.lm.text.write", interrupt)
    assert main.main(["data", "a", "b"]) == 130
    assert capsys.readouterr().err == "elastic-ckpt data: interrupted\n"


@pytest.mark.slow
def test_reader_that_has_had_enough_hears_no_complaint():
    command = runs.command("plan", "--hosts", "1,2", "--batches", "8")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as plan:
        plan.stdout.close()
        assert plan.stderr.read() == ""
        assert plan.wait() == 141


def test_data_verb_writes_texts_in_the_format_of_the_name_and_says_so(tmp_path):
    (tmp_path / "texts").mkdir()
    for letter in "ab":
        (tmp_path / "texts" / letter).write_text(letter * 600)
    for name, options, kind, source in (
        ("a.parquet", [], "parquet", parquet.Parquet),
        ("a", [], "arrayrecord", arrayrecord.ArrayRecord),
        ("b", ["--type", "parquet"], "parquet", parquet.Parquet),
    ):
        file = str(tmp_path / name)
        assert runs.verb("data", tmp_path / "texts", file, *options).startswith(
            f"{file}: 2 documents, 1,200 bytes of text, as {kind}\n"
            f"to train on it: grain_train_files={file} grain_file_type={kind}"
        )
        assert source(files=(file,)).index(file).num_records == 2
