"""The part of suite `data` that reads text runs, of each library."""

import pytest

from benchmarks import text


@pytest.mark.night
def test_text_is_measured_beside_each_library(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    figures = text.measure(
        tmp_path / "texts", num_tokens=20_000, num_rounds=1, num_characters=400_000
    )
    assert {
        "text_packed_mtok_per_sec",
        "text_ratio_tokenizer",
        "text_ratio_tiktoken",
        "text_ratio_sentencepiece",
        "text_ratio_grain_map",
    } <= figures.keys()
    assert all(figure.value > 0 for figure in figures.values())
