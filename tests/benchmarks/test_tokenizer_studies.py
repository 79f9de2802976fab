"""The studies of tokenizers: what they measure of a pair, their tables, and the loss that they compare with."""

import math

import numpy as np
import pytest
import torch

from benchmarks.science import tokenizer_pairs, tokenizer_tables, tokenizers, uld
from tests.token_kinds import TEXTS, train

HALVES = {"text": ([text * 3 for text in TEXTS], [text * 2 for text in TEXTS])}


def test_a_tokenizer_beside_itself_shares_everything_and_loses_nothing():
    found = tokenizer_pairs.measure(train("llama3"), train("llama3"), HALVES)["texts"]["text"]
    assert found["boundaries"] == found["teacher_boundaries"] == found["in_chunks"] == 1
    assert found["disagreement"] == 0 and found["merged_cells"] == 0 and found["left_out"] == 0
    assert found["entropy"] > 0 and found["entropy_kept"] == pytest.approx(1)


def test_another_tokenizer_shares_a_part_and_keeps_a_part():
    found = tokenizer_pairs.measure(train("llama3", 600), train("gpt2", 300), HALVES)["texts"]["text"]
    assert 0.2 < found["boundaries"] < found["teacher_boundaries"] <= 1
    assert 0.1 < found["entropy_kept"] < 1 and found["bytes_per_chunk"] > 1
    size = sum(len(text.encode()) for text in HALVES["text"][1])
    assert found["bytes"] == size and found["student_tokens"] > found["teacher_tokens"]


def test_a_refused_pair_is_recorded_with_the_reason_and_shown():
    from tokenizers import normalizers

    odd = train("gpt2", 310)
    odd.backend_tokenizer.normalizer = normalizers.Lowercase()
    found = tokenizer_pairs.measure(train("llama3"), odd, HALVES)
    assert "rewrites a text" in found["refused"]
    fine = tokenizer_pairs.measure(train("llama3"), train("llama3"), HALVES)
    fine["texts"]["other"] = {**fine["texts"]["text"], "left_out": 0.35}
    pairs = [{"teacher": "a", "student": "b", **found}, {"teacher": "a", "student": "c", **fine}]
    shown = tokenizer_tables.between({"texts": {"text": [1, 1], "other": [1, 1]}, "pairs": pairs})
    assert (
        "| a → c |" in shown
        and "100, 0.0, 100 | 35% rewritten |" in shown
        and "- a → b: " in shown
        and "rewrites a text" in shown
    )


def test_a_text_is_cut_into_documents_that_take_turns():
    lines = [f"line {number} of a text\n" for number in range(2000)]
    one, other = tokenizer_pairs._halves(iter(["".join(lines)]), 20_000)
    assert abs(len(one) - len(other)) <= 1 and 15_000 < sum(map(len, one + other)) <= 20_000
    both = "".join(each for pair in zip(one, other, strict=False) for each in pair)
    assert "".join(lines).startswith(both) and all(each.endswith("\n") for each in one)


@pytest.mark.parametrize("digits", [True, False])
def test_tokenizers_of_the_study_take_digits_as_asked(digits, monkeypatch):
    from kdtrain.data import corpus

    texts = [corpus.Document("a", text="x = 123 + 123\n" * 50)]
    monkeypatch.setattr(corpus, "documents", lambda *_: iter(texts))
    found = tokenizers._make(300, digits, 1000)
    assert (len(found("123").input_ids) == 3) == digits
    assert len(tokenizers._make(257, False, 1000)) == 257


def of(tokenizer, method, seed, bits, alpha=0.9):
    alpha = 0.0 if method == "cross-entropy" else alpha
    facts = {
        "cells": 10,
        "boundaries": 0.9,
        "inside": 0.08,
        "in_chunks": 1.0,
        "disagreement": 0.01,
        "entropy_kept": 0.95,
    }
    return {
        **{"tokenizer": tokenizer, "method": method, "alpha": alpha, "seed": seed, "bits_per_byte": bits},
        **{"teacher_bits_per_byte": 1.0, "alignment": facts if tokenizer != tokenizers.SAME else None},
    }


def test_the_share_of_the_ceiling_is_of_gains_by_seed_at_the_best_alpha(tmp_path, monkeypatch):
    monkeypatch.setattr(
        tokenizers,
        "environment",
        lambda folder: {"precision": "fp32", "cpu": "a cpu", "torch": "2", "date": "today"},
    )
    same = [of(tokenizers.SAME, "cross-entropy", seed, 2.0 + seed) for seed in (0, 1)]
    same += [of(tokenizers.SAME, "distilled", seed, 1.8 + seed) for seed in (0, 1)]
    other = [of("bytes", "cross-entropy", seed, 3.0 + seed) for seed in (0, 1)]
    other += [of("bytes", "cells", 0, 2.95, 0.5), of("bytes", "cells", 0, 2.9), of("bytes", "cells", 1, 3.9)]
    given = tokenizers.TokenizerStudy(out=tmp_path)
    specs = {tokenizers.SAME: tmp_path, "bytes": tmp_path}
    records = [*same, *other, of("bytes", "both", 0, None)]
    best = {each: tokenizers._best(records, *each) for each in tokenizers._kinds(specs)}
    assert best["bytes", "cells"] == 0.9 and best["bytes", "both"] is None
    record = tokenizers._record(given, tokenizers.Settings(10, 20, 2e-3), specs, best, records, 3)
    row = record["kinds"]["bytes"]["cells"]
    assert row["gain"] == pytest.approx(0.1) and row["share"] == pytest.approx(0.5) and row["seeds"] == 2
    shown = tokenizer_tables.students(record)
    assert "| bytes | cells | 3.400 ± 0.707 | +0.100 | 50% | 2 |" in shown and "3 runs are left" in shown
    assert "| bytes | both |" not in shown
    assert "| bytes | 10 | 90.0% | 8.0% | 100.0% | 1.0% | 95.0% |" in tokenizer_tables.rows(record)


def test_uld_is_the_sum_over_sorted_probabilities_at_common_boundaries():
    torch.manual_seed(0)
    vocabulary, length, samples = 9, 4, 5
    logits = torch.randn(1, length, vocabulary)
    counts = torch.tensor([[3.0, 2.0, 0.0], [1.0, 3.0, 1.0]])
    fields = (("loss_mask", "?"), ("source", "i8"), ("said", "i8"))
    rows = np.zeros(1, [("tokens", "i8", (length + 1,)), *((name, kind, (length,)) for name, kind in fields)])
    rows["tokens"], rows["loss_mask"], rows["source"] = [[1, 2, 3, 4, 5]], True, [[-1, 4, 4, 5]]
    rows["said"] = [[0, 0, 7, 0]]  # within a token

    class Taught:
        class manifest:
            class settings:
                seq_len = 2

        def read(self, numbers):
            assert numbers == [2]
            return type("Batch", (), {"targets": type("Targets", (), {"counts": counts, "num_samples": samples})})

    class Output:
        pass

    output = Output()
    output.logits = logits
    loss = uld._loss(lambda input_ids: output, rows, Taught())
    q = logits[0].softmax(-1)
    expected = -q.log()[range(4), [2, 3, 4, 5]].mean()
    for place, row in ((1, 0), (3, 1)):
        one, other = sorted(q[place].tolist(), reverse=True), sorted((counts[row] / samples).tolist(), reverse=True)
        other += [0.0] * (vocabulary - len(other))
        expected += 1.5 * sum(abs(a - b) for a, b in zip(one, other, strict=True)) / 2
    assert math.isclose(loss, expected, rel_tol=1e-5)
