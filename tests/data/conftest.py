"""A tokenizer of the 256 bytes and `<|endoftext|>`, so that tests can read tokens as text."""

import datasets
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kdtrain.data import formats


def _byte_tokenizer(**others):
    """Make a tokenizer for which a byte of the text is a token; the special tokens come after the bytes."""
    special = {"eos_token": "<|endoftext|>", **others}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special.values()))
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


@pytest.fixture(scope="session")
def make_tokenizer():
    return _byte_tokenizer


@pytest.fixture
def tokenizer():
    return _byte_tokenizer()


@pytest.fixture
def own_cache(tmp_path_factory, monkeypatch):
    """Give `datasets` a folder of its own, and log every line of a source again."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    formats.log_once.cache_clear()
