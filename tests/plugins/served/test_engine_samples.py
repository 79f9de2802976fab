"""What an engine sends of its logits is what a cache keeps of the same logits, or is refused."""

import json
import tracemalloc

import msgspec
import numpy as np
import pytest
import torch

from kdtrain.cache.format.codec import CodecSpec, draw_points, encode_sequences
from kdtrain.cache.format.compression import Coding
from kdtrain.plugins.served.engine_samples import SampleRequest, entries, is_sampled, read_samples, sample


class Entry(msgspec.Struct):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SPEC = CodecSpec(kind="sparse", vocab_size=500, num_samples=50)
LENGTH = 40
ASKED = SampleRequest(number=50, seed=3, split="train", row=7)


@pytest.fixture
def prompt():
    """Logits [T, V] and the T + 1 tokens of a prompt."""
    generator = torch.Generator().manual_seed(1)
    logits_TV = 3 * torch.randn(LENGTH, SPEC.vocab_size, generator=generator)
    return logits_TV, torch.randint(SPEC.vocab_size, (LENGTH + 1,), generator=generator)


def kept_locally(logits_TV, tokens, asked=ASKED):
    how = {"seed": asked.seed, "split": asked.split, "first": asked.row}
    return {k: v[0] for k, v in encode_sequences(logits_TV[None], tokens[None, 1:], SPEC, **how).items()}


def answer_of(logits_TV, tokens, asked=ASKED, chunk=LENGTH):
    """`prompt_logprobs` as a client reads it, the prompt sampled in chunks."""
    parts = []
    for start in range(0, LENGTH, chunk):
        stop = start + chunk
        parts.append(sample(logits_TV[start:stop], tokens[start + 1 : stop + 1], asked, start))
    tensors = [torch.cat(part) for part in zip(*parts, strict=True)]
    assert is_sampled(tensors[2])
    return [None, *(listed(*each) for each in entries(*tensors))]


def listed(label, logprob, receipt, text):
    """One position as a client types what came as JSON."""
    position = {label: {"logprob": logprob, "rank": receipt, "decoded_token": text}}
    return msgspec.json.decode(json.dumps(position), type=dict[int, Entry])


def read(answer, tokens, asked=ASKED):
    return read_samples(answer, tokens.tolist(), asked, SPEC)


@pytest.mark.parametrize(
    "chunk, dtype", [(1, torch.float32), (7, torch.float32), (LENGTH, torch.float32), (LENGTH, torch.bfloat16)]
)
def test_a_served_prompt_has_the_samples_of_a_local_capture(prompt, chunk, dtype):
    prompt = prompt[0].to(dtype), prompt[1]
    found, expected = read(answer_of(*prompt, chunk=chunk), prompt[1]), kept_locally(*prompt)
    for name in ("ids", "counts"):
        assert np.array_equal(found[name], expected[name]), name
        assert found[name].dtype == expected[name].dtype
    for name in ("label_logprob", "tail", "logit_mean", "logit_std"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-6, atol=2e-6)


def test_what_is_stored_of_either_is_the_same(prompt):
    found, expected = read(answer_of(*prompt), prompt[1]), kept_locally(*prompt)
    tokens = prompt[1][None].numpy()
    stored = []
    for kept in (found, expected):
        one = {name: kept[name][None] for name in found}
        stored.append(Coding.fit(tokens, one, SPEC).pack(tokens, one))
    for name, values in stored[1].items():
        assert np.array_equal(stored[0][name], values), name


def test_a_row_may_come_in_several_prompts(prompt):
    logits_TV, tokens = prompt
    whole = kept_locally(logits_TV, tokens)
    rest = SampleRequest(number=50, seed=3, split="train", row=7, first=25)
    tensors = sample(logits_TV[25:], tokens[26:], rest, 0)
    found = read_samples([None, *(listed(*each) for each in entries(*tensors))], tokens[25:].tolist(), rest, SPEC)
    assert np.array_equal(found["ids"], whole["ids"][25:]) and np.array_equal(found["counts"], whole["counts"][25:])


def test_a_position_takes_few_bytes(prompt):
    assert len(msgspec.json.encode(answer_of(*prompt))) / LENGTH < 400


@pytest.mark.parametrize("change", [{"seed": 4}, {"split": "validation"}, {"row": 8}, {"first": 1}], ids=str)
def test_samples_at_other_points_have_no_receipt(prompt, change):
    others = SampleRequest(**{"number": 50, "seed": 3, "split": "train", "row": 7} | change)
    with pytest.raises(ValueError, match="position 0 not sampled by kdtrain as asked"):
        read(answer_of(*prompt, others), prompt[1])


def test_a_servers_own_top_k_has_no_receipt(prompt):
    logits_TV, tokens = prompt
    top = logits_TV.log_softmax(-1).topk(3)
    answer = [None]
    for t in range(LENGTH):
        likely = zip(top.indices[t].tolist(), top.values[t].tolist(), (1, 2, 3), strict=True)
        answer.append({i: Entry(p, rank, "x") for i, p, rank in likely})
    with pytest.raises(ValueError, match="is kdtrain installed where the server runs"):
        read(answer, tokens)
    only_label = [None, *({tokens[t + 1].item(): Entry(-1.0, 2)} for t in range(LENGTH))]
    with pytest.raises(ValueError, match="not sampled by kdtrain"):
        read(only_label, tokens)


def test_positions_that_are_shifted_or_of_other_tokens_have_no_receipt(prompt):
    answer = answer_of(*prompt)
    with pytest.raises(ValueError, match="position 5"):
        read([*answer[:6], answer[7], *answer[7:]], prompt[1])
    others = prompt[1].clone()
    others[10] = (others[10] + 1) % SPEC.vocab_size
    with pytest.raises(ValueError, match="position 9"):
        read(answer, others)


@pytest.mark.parametrize("cut", [slice(0, 0), slice(0, -1), slice(1, None)], ids=str)
def test_an_answer_with_fewer_positions_is_refused(prompt, cut):
    with pytest.raises(ValueError, match="positions, the prompt 41 tokens"):
        read(answer_of(*prompt)[cut], prompt[1])


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "-1 -2 3", "-1 -2 3 4:49", "-1 -2 3 4:51", "-1 -2 3 500:50", "-1 -2 3 -1:50", "-1 -2 3 4:25 4:25"),
        *("-1 -2 3 4:51 5:-1", "-1 -2 3 4:50 5:0", "-1 -2 nan 4:50", "5 -2 3 4:50", "-1 5 3 4:50", "-1 -2 -3 4:50"),
        *("-1e300 -2 3 4:50", "-1 -2 1e300 4:50", "-1 -2 4:50", "-1 -2 3 4:x", "-1 -2 3 4:50:1"),
        *("-1 -2 3" + " 4:1" * 10_000, None),
    ],
    ids=lambda text: str(text)[:20],
)
def test_samples_that_cannot_be_are_refused(prompt, wrong):
    answer = answer_of(*prompt)
    (found,) = answer[3].values()
    found.decoded_token = wrong
    with pytest.raises(ValueError, match="position 2"):
        read(answer, prompt[1])


@pytest.mark.parametrize("wrong", [float("nan"), 0.5])
def test_a_label_without_a_log_probability_is_refused(prompt, wrong):
    answer = answer_of(*prompt)
    (found,) = answer[3].values()
    found.logprob = wrong
    with pytest.raises(ValueError, match="no distribution at position 2"):
        read(answer, prompt[1])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_position_without_a_distribution_is_named(prompt, wrong):
    logits_TV, tokens = prompt
    logits_TV[4, 9] = wrong
    with pytest.raises(ValueError, match="no distribution at position 4"):
        read(answer_of(logits_TV, tokens), tokens)


def test_a_request_reads_back_from_its_arguments():
    asked = SampleRequest(number=12, seed=-5, split="validation", row=10**12, first=77)
    assert SampleRequest.from_args(json.loads(json.dumps(asked.to_args()))) == asked
    assert SampleRequest.from_args({**asked.to_args(), "other": 1}) == asked
    assert SampleRequest.from_args({"other": 1}) is None and SampleRequest.from_args(None) is None
    assert np.array_equal(asked.points(2, 5), draw_points(-5, "validation", 10**12, 82, 12)[79:])


def test_a_late_part_of_a_long_row_takes_no_memory_for_its_beginning():
    asked = SampleRequest(number=250, seed=0, split="train", row=0, first=2**17)
    tracemalloc.start()
    points_ND = asked.points(1, 3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert points_ND.shape == (2, 250) and peak < 2**23


@pytest.mark.parametrize(
    "key, value",
    [
        *(("samples", each) for each in (0, 256, "50", 50.0)),
        *(("split", each) for each in ("", "a b", 3)),
        *(("seed", 2**64), ("seed", True), ("row", -1), ("first", 2**20 + 1)),
    ],
)
def test_an_impossible_request_names_its_argument(key, value):
    with pytest.raises(ValueError, match=f"kdtrain_{key}"):
        SampleRequest.from_args(ASKED.to_args() | {f"kdtrain_{key}": value})


def test_a_request_that_lacks_an_argument_or_has_another_is_refused():
    args = ASKED.to_args()
    with pytest.raises(ValueError, match="together"):
        SampleRequest.from_args(args | {"kdtrain_top_k": 8})
    with pytest.raises(ValueError, match="kdtrain_row"):
        SampleRequest.from_args({key: each for key, each in args.items() if key != "kdtrain_row"})
