"""Small models of Hugging Face's Transformers: written, and loaded after an export.

    python -m tests.universal.writing.hugging_face_models write DIRECTORY
    python -m tests.universal.writing.hugging_face_models load BEFORE AFTER [DTYPE]

`load` compares all values, which are cast to the dtype, and the files of the tokenizer.
"""

import pathlib
import sys

import tokenizers
import torch
import transformers

# The head has 16 elements: the square root of that is exact.
_SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write(directory: pathlib.Path) -> None:
    """Writes models whose output is the embedding, and is not."""
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, "[UNK]")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="[UNK]"
    )
    for name, is_tied in (("tied", True), ("untied", False)):
        torch.manual_seed(is_tied)
        config = transformers.LlamaConfig(**_SIZES, tie_word_embeddings=is_tied)
        model = transformers.LlamaForCausalLM(config)
        model.generation_config.temperature = 0.5
        model.generation_config.do_sample = True
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)


def load(before: pathlib.Path, after: pathlib.Path, dtype: str = "float32") -> None:
    """Compares a model with one that was exported."""
    made, info = transformers.AutoModelForCausalLM.from_pretrained(
        after, output_loading_info=True
    )
    assert not any(info.values()), info
    assert made.config.dtype == made.dtype == getattr(torch, dtype), made.dtype
    assert made.generation_config.temperature == 0.5
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        before, dtype=made.dtype
    )
    values = made.state_dict()
    assert values.keys() == expected.state_dict().keys()
    for name, each in expected.state_dict().items():
        assert torch.equal(values[name], each), name
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        torch.testing.assert_close(made(tokens).logits, expected(tokens).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(after)
    assert tokenizer.get_vocab() == {"a": 0, "b": 1, "[UNK]": 2}


if __name__ == "__main__":
    verb, *paths = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    if verb == "write":
        write(pathlib.Path(paths[0]))
    else:
        load(pathlib.Path(paths[0]), pathlib.Path(paths[1]), *paths[2:])
