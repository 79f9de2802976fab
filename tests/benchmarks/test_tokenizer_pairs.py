"""What the study of published tokenizers measures of a pair."""

import pytest

from benchmarks.science import tokenizer_pairs
from tests.token_kinds import TEXTS, train

HALVES = {"text": ([text * 3 for text in TEXTS], [text * 2 for text in TEXTS])}


def test_a_tokenizer_beside_itself_shares_everything_and_loses_nothing():
    found = tokenizer_pairs.measure(train("llama3"), train("llama3"), HALVES)["texts"]["text"]
    assert found["boundaries"] == found["teacher_boundaries"] == 1
    assert found["disagreement"] == 0 and found["merged_cells"] == 0 and found["left_out"] == 0
    assert found["entropy"] > 0 and found["entropy_kept"] == pytest.approx(1)


def test_another_tokenizer_shares_a_part_and_keeps_a_part():
    found = tokenizer_pairs.measure(train("llama3", 600), train("gpt2", 300), HALVES)["texts"]["text"]
    assert 0.2 < found["boundaries"] < found["teacher_boundaries"] <= 1
    assert 0.1 < found["entropy_kept"] < 1 and found["student_tokens"] > found["teacher_tokens"]


def test_a_refused_pair_is_recorded_with_the_reason():
    from tokenizers import normalizers

    odd = train("gpt2", 310)
    odd.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert "rewrites a text" in tokenizer_pairs.measure(train("llama3"), odd, HALVES)["refused"]


def test_a_text_is_cut_into_documents_that_take_turns():
    lines = [f"line {number} of a text\n" for number in range(2000)]
    one, other = tokenizer_pairs._halves(iter(["".join(lines)]), 20_000)
    assert abs(len(one) - len(other)) <= 1 and 15_000 < sum(map(len, one + other)) <= 20_000
    both = "".join(each for pair in zip(one, other, strict=False) for each in pair)
    assert "".join(lines).startswith(both) and all(each.endswith("\n") for each in one)
