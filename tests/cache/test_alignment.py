"""The alignment detector on a Markov text, whose teacher is the chain itself."""

import dataclasses

import pytest
import torch

from kdtrain.cache.format.codec import decode, encode_sequences
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.tools.self_check import detect
from kdtrain.objective.batch import Batch

V, T = 64, 40
DENSE = CodecSpec(kind="dense", vocab_size=V)
TOP = CodecSpec(kind="sparse", vocab_size=V, top_k=6)
BOTH = CodecSpec(kind="sparse", vocab_size=V, top_k=3, num_samples=8)
SAMPLES = CodecSpec(kind="sparse", vocab_size=V, num_samples=8)
TOKENS = CodecSpec(kind="tokens", vocab_size=V)
CHAIN = 3 * torch.randn(V, V, generator=torch.Generator().manual_seed(0))
RUNS = (0.6 * torch.eye(V) + 0.4 / V).log()


def rows(spec: CodecSpec, shift: int = 0, number: int = 20, chain: torch.Tensor = CHAIN, seed: int = 1) -> Batch:
    """Draw rows of a chain, with the chain's own probabilities, moved by `shift`."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.zeros(number, T + 3, dtype=torch.int64)
    for t in range(T + 2):
        text[:, t + 1] = torch.multinomial(chain[text[:, t]].softmax(-1), 1, generator=generator)[:, 0]
    tokens, logits = text[:, 1 : T + 2], chain[text[:, 1 + shift : 1 + shift + T]]
    kept = encode_sequences(logits, tokens[:, 1:], spec, seed=seed, split="train", first=0)
    ones = torch.ones(number, T, dtype=torch.bool)
    return Batch(tokens, ones, torch.zeros(number, T, dtype=torch.int64), decode(kept, spec))


@pytest.mark.parametrize("spec", [DENSE, TOP, BOTH, SAMPLES], ids=["dense", "top-k", "both", "samples"])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_the_shift_is_found_in_every_codec(spec: CodecSpec, shift: int) -> None:
    found = detect([rows(spec, shift)])
    assert found.shift == shift and found.p_values[shift + 1] < 1e-4
    assert max(found.label_mass) == found.label_mass[shift + 1] > 0.25
    assert found.label_rank[shift + 1] == min(found.label_rank) <= 2


def test_batches_add_up_to_one_answer() -> None:
    whole = rows(TOP, 1)
    parts = [
        Batch(whole.tokens[i : i + 5], whole.loss_mask[i : i + 5], whole.segments[i : i + 5],
              whole.targets[i * T : i * T + 5 * T])  # type: ignore[index]
        for i in range(0, 20, 5)
    ]  # fmt: skip
    assert detect(parts) == detect([whole])


@pytest.mark.parametrize("spec", [DENSE, SAMPLES], ids=["dense", "samples"])
def test_a_text_of_runs_accuses_no_aligned_cache(spec: CodecSpec) -> None:
    # In a run the entries are mostly about the token just read: the label's mass at -1 is larger than at 0.
    for seed in range(20):
        assert detect([rows(spec, chain=RUNS, seed=seed)]).shift in (0, None)


def test_a_teacher_that_knows_nothing_or_repeats_its_input_is_no_evidence() -> None:
    even, echo = (dataclasses.replace(rows(DENSE), targets=None) for _ in range(2))
    labels = even.tokens[:, 1:]
    for batch, logits in (
        (even, torch.zeros(20, T, V)),
        (echo, 0.5 * torch.nn.functional.one_hot(echo.tokens[:, :-1], V).float()),
    ):
        kept = encode_sequences(logits, labels, DENSE, seed=0, split="train", first=0)
        assert detect([dataclasses.replace(batch, targets=decode(kept, DENSE))]).shift is None


def test_without_labels_targets_or_rows_there_is_no_verdict() -> None:
    batch = rows(TOP, 1)
    masked = detect([dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))])
    assert (masked.shift, masked.rows, masked.labels) == (None, 0, 0)
    assert masked.to_json()["label_mass"] == {"-1": None, "0": None, "+1": None}
    assert detect([dataclasses.replace(batch, targets=None)]).shift is None
    assert detect([]).shift is None
    assert detect([rows(TOP, 1, number=9)]).shift is None and detect([rows(TOP, 1, number=10)]).shift == 1


def test_labels_near_the_start_of_a_document_and_outside_of_the_loss_are_left_out() -> None:
    batch = rows(TOP)
    whole = detect([batch]).labels
    segments = (torch.arange(T) >= T // 2).long().expand(20, T)
    mask = batch.loss_mask.clone()
    mask[:, 10] = False
    repeated = sum(len(row[1:][row[1:] == row[:-1]]) for row in batch.tokens[:, :-1])
    assert repeated and whole < 20 * (T - 2)  # what follows itself is not judged
    in_documents = detect([dataclasses.replace(batch, segments=segments)]).labels
    assert whole - 2 * 20 <= in_documents < whole  # the two labels after the start of the second one
    assert whole - 3 * 20 <= detect([dataclasses.replace(batch, loss_mask=mask)]).labels < in_documents
