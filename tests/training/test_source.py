"""Sources of micro-batches: in order, one ahead, and an online teacher with the same interface."""

import itertools
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtrain.cache.read.reader import CacheReader
from kdtrain.errors import RunError
from kdtrain.models.output_head import HeadPart
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.targets import OnlineTargets
from kdtrain.teaching.local import LocalTeacher
from kdtrain.training.sources.build import StudentSource
from kdtrain.training.sources.cache import CachedSource
from kdtrain.training.sources.source import feed


def indices(step):
    return np.arange(step * 6, step * 6 + 6)


class Numbers:
    """A source whose batches are their indices."""

    def __init__(self, overlaps, fails_at=None):
        self.overlaps, self.fails_at = overlaps, fails_at
        self.reads, self.threads = [], set()

    def __len__(self):
        return 1000

    def read(self, numbers):
        self.reads.append(numbers.tolist())
        self.threads.add(threading.current_thread())
        if self.fails_at in numbers:
            raise OSError("a shard is gone")
        return numbers.tolist()


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("micro", [1, 2, 3, 6])
def test_each_step_gets_its_sequences_in_order(overlaps, micro):
    steps = feed(Numbers(overlaps), indices, micro)
    found = [list(batches) for batches in itertools.islice(steps, 3)]
    for step, batches in enumerate(found):
        assert len(batches) == 6 // micro
        assert [number for batch in batches for number in batch] == indices(step).tolist()


def test_reading_runs_in_another_thread_and_no_further_than_one_micro_batch_ahead():
    source = Numbers(overlaps=True)
    batches = next(feed(source, indices, 3))
    next(batches)
    next(batches)
    assert len(source.reads) <= 3
    assert threading.current_thread() not in source.threads


def test_an_online_teacher_runs_in_the_thread_of_the_student_and_not_ahead():
    source = Numbers(overlaps=False)
    batches = next(feed(source, indices, 3))
    next(batches)
    assert source.reads == [[0, 1, 2]]
    assert source.threads == {threading.current_thread()}


@pytest.mark.parametrize("overlaps", [True, False])
def test_an_error_of_the_reader_arrives_at_its_step(overlaps):
    steps = feed(Numbers(overlaps, fails_at=7), indices, 6)
    assert list(next(steps)) == [indices(0).tolist()]
    with pytest.raises(OSError, match="a shard is gone"):
        list(next(steps))


def test_an_error_of_the_reader_does_not_wait_for_a_read_that_never_ends():
    answers, answered = threading.Event(), []

    class Stuck(Numbers):
        def read(self, numbers):
            if numbers[0] == 3:
                answered.append(answers.wait(20))
            return super().read(numbers)

    batches = next(feed(Stuck(overlaps=True, fails_at=0), indices, 3))
    with pytest.raises(OSError, match="a shard is gone"):
        next(batches)
    assert not answered
    answers.set()


@pytest.mark.parametrize("document_mask", [False, True])
def test_an_online_teacher_answers_with_its_distributions_at_the_same_tokens(workshop, document_mask):
    tokens, asked = workshop.source(6), []
    # its output head is padded beyond the vocabulary of the student
    table = torch.nn.Parameter(torch.randn(300, 310, generator=torch.Generator().manual_seed(0)))

    class Table(LocalTeacher):
        head = HeadPart()

        def hidden_states(self, tokens_BT, segments_BT, layers=()):
            asked.append((tokens_BT, segments_BT))
            return table[tokens_BT].detach(), [table[tokens_BT].detach()[..., :5] for _ in layers]

    teacher = Table(ModelSpec(name="table", source="."), torch.device("cpu"), "fp32")
    tokens.facts = replace(tokens.facts, document_mask=document_mask)
    source = StudentSource(tokens, torch.device("cpu"), 300, teacher, layers=(1,))
    assert source.facts.teacher == {"spec": "table"} and source.facts.targets == "dense"
    batch, plain = source.read(np.array([4, 1])), tokens.read(np.array([4, 1]))
    assert torch.equal(batch.tokens, plain.tokens)
    assert torch.equal(asked[0][0], plain.tokens[:, :-1])
    assert (asked[0][1] is None) != document_mask
    assert isinstance(batch.targets, OnlineTargets)
    targets = batch.targets.resolved()
    expected = torch.log_softmax(table[plain.tokens[:, :-1]].flatten(0, 1)[:, :300], -1)
    torch.testing.assert_close(targets.logprobs, expected)
    labels = plain.tokens[:, 1:].reshape(-1, 1)
    torch.testing.assert_close(targets.label_logprob, expected.gather(1, labels)[:, 0])
    assert torch.equal(batch.states[0], table[plain.tokens[:, :-1]].flatten(0, 1)[:, :5])
    # tensors made in inference mode could not meet a learnable temperature
    assert not batch.targets.hidden.requires_grad
    assert not batch.targets.hidden.is_inference()


def test_a_token_that_a_narrower_student_has_no_row_for_is_refused_with_both_numbers():
    reader = CacheReader(Path(__file__).parents[1] / "golden" / "cache" / "sparse", "train")
    largest = int(reader.read(range(len(reader))).tokens.max())
    numbers = np.arange(len(reader))
    cached, cpu = CachedSource(reader), torch.device("cpu")
    assert len(StudentSource(cached, cpu, largest + 1).read(numbers).tokens) == len(reader)
    line = f"sparse holds token {largest}, .* the student has a vocabulary of {largest}: set its vocab_size to"
    with pytest.raises(RunError, match=line):
        StudentSource(cached, cpu, largest).read(numbers)
