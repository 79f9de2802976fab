"""The tokenizer that ships with the project, in teachers/."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

_FOLDER = Path(__file__).resolve().parents[2] / "teachers" / "stdlib-5m"


@pytest.fixture(scope="module")
def shipped():
    return AutoTokenizer.from_pretrained(_FOLDER)


def test_the_shipped_tokenizer_has_2048_entries_and_ends_documents(shipped):
    assert len(shipped) == 2048
    assert (shipped.eos_token, shipped.eos_token_id) == ("<|endoftext|>", 0)
    assert shipped.bos_token is None


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back_from_the_shipped_tokenizer(shipped, text):
    assert shipped.decode(shipped(text).input_ids) == text


def test_the_shipped_tokenizer_knows_every_byte(shipped):
    tokens = shipped("".join(map(chr, range(256))) + "漢字🎉\U0010ffff").input_ids
    assert shipped.unk_token is None and all(0 < token < 2048 for token in tokens)
