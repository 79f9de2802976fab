"""What a server answers, as entries: ordered, typed and bounded."""

import re

import numpy as np
import pytest

import kdtrain as kd
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.plugins.served.answers import Answers, Entry, Span, Wrong, spans_of
from kdtrain.plugins.served.client import SMALL, Client
from kdtrain.plugins.served.fingerprint import Fingerprint
from tests.captures import capture

SPEC = CodecSpec(kind="sparse", top_k=3, vocab_size=10)
SPAN = Span("train", 0, 0, [1, 2, 3])


def lists(**changes):
    """Make an answer about `SPAN`: the label of the first position is among the entries, that of the second is not."""
    first = {2: Entry(-0.5, 1), 4: Entry(-1.5, 2), 5: Entry(-3.0, 3)}
    second = {3: Entry(-6.0, 7), 9: Entry(-2.0, 3), 8: Entry(-1.0, 2), 7: Entry(-0.9, 1)}
    return [None, first | changes.get("first", {}), second | changes.get("second", {})]


def test_entries_are_ordered_by_their_probability_and_the_label_outside_is_no_entry():
    arrays = Answers(SPEC).read(SPAN, lists())
    assert arrays["ids"].tolist() == [[2, 4, 5], [7, 8, 9]]
    np.testing.assert_allclose(arrays["logprobs"], [[-0.5, -1.5, -3.0], [-0.9, -1.0, -2.0]])
    np.testing.assert_allclose(arrays["label_logprob"], [-0.5, -6.0])
    rest = np.log(1 - np.exp(arrays["logprobs"]).sum(-1))
    one = SPEC.knots.index(1.0)
    np.testing.assert_allclose(arrays["tail"][:, one], rest, atol=1e-5)
    tied = lists(first={4: Entry(-3.0, 3), 5: Entry(-3.0, 2)})
    assert Answers(SPEC).read(SPAN, tied)["ids"][0].tolist() == [2, 5, 4]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"first": {6: Entry(-4.0)}, "second": {1: Entry(-9.0)}}, "token 1 is more likely than|5 entries for token 2"),
        ({"second": {1: Entry(-9.0), 0: Entry(-9.0)}}, "6 entries for token 2 instead of 3"),
        ({"first": {2: Entry(-5000.0)}}, "processed log-probabilities"),
        ({"first": {2: Entry(0.01)}}, "not log-probabilities"),
        ({"first": {4: Entry(-0.5)}}, "their sum is above 1"),
        ({"second": {i: Entry(p) for i, p in {3: -9, 9: -8, 8: -7, 7: -6}.items()}}, "than 10 entries can have"),
        ({"first": {2: Entry(float("inf"))}}, "not finite"),
        ({"second": {3: Entry(-0.1, 1)}}, "more likely than entry 3, and is not among them|sum is above 1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(change, words):
    with pytest.raises(Wrong, match=words):
        Answers(SPEC).read(SPAN, lists(**change))


def test_only_the_span_of_the_loss_is_asked_for():
    tokens, segments = np.arange(9), np.array([0, 0, 0, 1, 1, 1, 2, 2])
    counted = np.array([0, 1, 0, 0, 1, 1, 0, 0], bool)
    assert [each.tokens for each in spans_of("train", 5, tokens, counted, None)] == [[0, 1, 2, 3, 4, 5, 6]]
    found = spans_of("train", 5, tokens, counted, segments)
    assert [(each.start, each.tokens) for each in found] == [(0, [0, 1, 2]), (3, [3, 4, 5, 6])]
    assert spans_of("train", 5, tokens, counted & False, None) == []


def test_a_fingerprint_of_a_stranger_is_typed(server):
    good = capture(server).manifest.settings.teacher["fingerprint"]
    assert Fingerprint.from_json(good).to_json() == good
    for key, value in (("tokens", [[1]]), ("ids", [[[1, 2]]]), ("ids", "x"), ("noise", None), ("logprobs", [[["a"]]])):
        assert Fingerprint.from_json({**good, key: value}) is None
    assert Fingerprint.from_json({**good, "ids": [[[10**40] * 4] * 31] * 2}) is None


def test_a_record_beyond_its_bound_is_not_read(server):
    client = Client([server.url], concurrency=1, timeout=5, patience=0)
    server.name = "x" * (SMALL + 1)
    with pytest.raises(kd.RunError, match="more than 1,048,576 bytes; tried 3 times"):
        client.get(client.hosts[0], f"{server.url}/models", dict)
    assert re.fullmatch(r"http://127.0.0.1:\d+/v1", str(client.hosts[0]))
