import subprocess
import sys

import pytest

from elastic_ckpt.cli import main
from elastic_ckpt.data.sources import arrayrecord, parquet, tfrecord
from tests import runs


def test_a_verb_is_required(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main([])
    assert ended.value.code == 2
    assert "VERB" in capsys.readouterr().err


def test_help_needs_none_of_the_heavy_libraries():
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
    assert ended.stdout.endswith("[]\n")
    assert "key=value" in ended.stdout


def test_an_interrupted_verb_says_so_and_returns_130(monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("elastic_ckpt.data.text.write", interrupt)
    assert main.main(["data", "a", "b"]) == 130
    assert capsys.readouterr().err == "elastic-ckpt data: interrupted\n"


def test_a_reader_that_has_had_enough_hears_no_complaint():
    command = runs.command("plan", "--hosts", "1,2", "--batches", "8")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as plan:
        plan.stdout.close()
        assert plan.stderr.read() == ""
        assert plan.wait() == 141


def test_the_data_verb_writes_a_directory_and_says_what_is_in_it(tmp_path):
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / name).write_text(name * 600)
    output = runs.verb("data", tmp_path / "texts", tmp_path / "out")
    assert output == (
        f"{tmp_path}/out: 2 documents, 1,200 bytes of text, as arrayrecord\n"
    )
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "options", "source"),
    [
        ("a.parquet", [], parquet.Parquet),
        ("a.tfrecord", [], tfrecord.TFRecord),
        ("a.array_record", [], arrayrecord.ArrayRecord),
        ("a", ["--type", "parquet"], parquet.Parquet),
        ("a.parquet", ["--type", "tfrecord"], tfrecord.TFRecord),
    ],
)
def test_the_data_verb_writes_the_format_that_the_name_ends_in(
    tmp_path, name, options, source
):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a").write_text("a text")
    file = str(tmp_path / name)
    runs.verb("data", tmp_path / "texts", file, *options)
    assert source(files=(file,)).index(file).num_records == 1


def test_the_data_verb_names_a_directory_that_is_not_there(tmp_path):
    output = runs.verb("data", tmp_path / "none", tmp_path / "out", code=1)
    assert output.startswith("elastic-ckpt data: ")
    assert "none: no such directory" in output
