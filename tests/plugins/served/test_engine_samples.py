"""What an engine sends of its logits is what a cache keeps of the same logits, or is refused."""

import json
import tracemalloc

import msgspec
import numpy as np
import pytest
import torch

from kdtrain.cache.format.codec import draw_points, encode_sequences
from kdtrain.cache.format.compression import Coding
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.plugins.served.answers import Entry
from kdtrain.plugins.served.engine_samples import SampleRequest, entries, is_sampled, read_samples, sample

SPEC = CodecSpec(kind="sparse", vocab_size=500, num_samples=50)
LENGTH = 40
ASKED = SampleRequest(number=50, seed=3, split="train", row=7)


@pytest.fixture
def prompt():
    """Make logits [T, V] and the T + 1 tokens of a prompt."""
    generator = torch.Generator().manual_seed(1)
    logits_TV = 3 * torch.randn(LENGTH, SPEC.vocab_size, generator=generator)
    return logits_TV, torch.randint(SPEC.vocab_size, (LENGTH + 1,), generator=generator)


def kept_locally(logits_TV, tokens, asked=ASKED):
    how = {"seed": asked.seed, "split": asked.split, "first": asked.row}
    return {k: v[0] for k, v in encode_sequences(logits_TV[None], tokens[None, 1:], SPEC, **how).items()}


def answer_of(logits_TV, tokens, asked=ASKED, chunk=LENGTH):
    """Sample a prompt in chunks; return `prompt_logprobs` as a client reads it."""
    parts = []
    for start in range(0, LENGTH, chunk):
        stop = start + chunk
        parts.append(sample(logits_TV[start:stop], tokens[start + 1 : stop + 1], asked, start))
    tensors = [torch.cat(part) for part in zip(*parts, strict=True)]
    assert is_sampled(tensors[2])
    return [None, *(listed(*each) for each in entries(*tensors))]


def listed(label, logprob, receipt, text):
    """Return one position as a client types the JSON."""
    position = {label: {"logprob": logprob, "rank": receipt, "decoded_token": text}}
    return msgspec.json.decode(json.dumps(position), type=dict[int, Entry])


def read(answer, tokens, asked=ASKED):
    return read_samples(answer, tokens.tolist(), asked, SPEC)


@pytest.mark.parametrize(
    "chunk, dtype", [(1, torch.float32), (7, torch.float32), (LENGTH, torch.float32), (LENGTH, torch.bfloat16)]
)
def test_a_served_prompt_has_the_samples_of_a_local_capture_and_is_stored_alike(prompt, chunk, dtype):
    prompt = prompt[0].to(dtype), prompt[1]
    found, expected = read(answer_of(*prompt, chunk=chunk), prompt[1]), kept_locally(*prompt)
    for name in ("ids", "counts"):
        assert np.array_equal(found[name], expected[name]), name
        assert found[name].dtype == expected[name].dtype
    for name in ("label_logprob", "tail", "logit_mean", "logit_std"):
        np.testing.assert_allclose(found[name], expected[name], rtol=2e-6, atol=2e-6)
    tokens, stored = prompt[1][None].numpy(), []
    for kept in (found, expected) if dtype == torch.float32 else ():
        one = {name: kept[name][None] for name in found}
        stored.append(Coding.fit(tokens, one, SPEC).pack(tokens, one))
    assert all(np.array_equal(stored[0][name], values) for name, values in (stored[1] if stored else {}).items())


def test_a_row_may_come_in_several_prompts(prompt):
    logits_TV, tokens = prompt
    whole = kept_locally(logits_TV, tokens)
    rest = SampleRequest(number=50, seed=3, split="train", row=7, first=25)
    tensors = sample(logits_TV[25:], tokens[26:], rest, 0)
    found = read_samples([None, *(listed(*each) for each in entries(*tensors))], tokens[25:].tolist(), rest, SPEC)
    assert np.array_equal(found["ids"], whole["ids"][25:]) and np.array_equal(found["counts"], whole["counts"][25:])


def test_a_position_takes_few_bytes(prompt):
    assert len(msgspec.json.encode(answer_of(*prompt))) / LENGTH < 400


def at_other_points(**change):
    others = SampleRequest(**{"number": 50, "seed": 3, "split": "train", "row": 7} | change)
    return lambda logits, tokens, answer: answer_of(logits, tokens, others)


def own_top_k(logits, tokens, answer):
    top = logits.log_softmax(-1).topk(3)
    likely = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [
        None,
        *({i: Entry(p, rank, "x") for rank, (i, p) in enumerate(zip(*each, strict=True), 1)} for each in likely),
    ]


def another_token(logits, tokens, answer):
    tokens[10] = (tokens[10] + 1) % SPEC.vocab_size
    return answer


def non_finite(wrong):
    def change(logits, tokens, answer):
        logits[4, 9] = wrong
        return answer_of(logits, tokens)

    return change


def with_entry(**changes):
    """Change the text, or log p, of an answer at position 2."""

    def change(logits, tokens, answer):
        (found,) = answer[3].values()
        for name, value in changes.items():
            setattr(found, name, value)
        return answer

    return change


IMPOSSIBLE = [
    *("", "-1 -2 3", "-1 -2 3 4:49", "-1 -2 3 4:51", "-1 -2 3 500:50", "-1 -2 3 -1:50", "-1 -2 3 4:25 4:25"),
    *("-1 -2 3 4:51 5:-1", "-1 -2 3 4:50 5:0", "-1 -2 nan 4:50", "5 -2 3 4:50", "-1 5 3 4:50", "-1 -2 -3 4:50"),
    *("-1e300 -2 3 4:50", "-1 -2 1e300 4:50", "-1 -2 4:50", "-1 -2 3 4:x", "-1 -2 3 4:50:1"),
    *("-1 -2 3" + " 4:1" * 10_000, None),
]
WRONG = {
    **{key: (at_other_points(**{key: value}), "position 0 not sampled by kdtrain as asked") for key, value in
       {"seed": 4, "split": "validation", "row": 8, "first": 1}.items()},
    "top-k": (own_top_k, "is kdtrain installed where the server runs"),
    "label": (lambda _, tokens, __: [None, *({int(each): Entry(-1.0, 2)} for each in tokens[1:])], "not sampled by kd"),
    "shifted": (lambda _, __, answer: [*answer[:6], answer[7], *answer[7:]], "position 5"),
    "other token": (another_token, "position 9"),
    "nothing": (lambda *given: [], "positions, the prompt 41 tokens"),
    "shorter": (lambda _, __, answer: answer[:-1], "positions, the prompt 41 tokens"),
    "later": (lambda _, __, answer: answer[1:], "positions, the prompt 41 tokens"),
    **{str(text)[:20]: (with_entry(decoded_token=text), "position 2") for text in IMPOSSIBLE},
    **{str(value): (with_entry(logprob=value), "no distribution at position 2") for value in (float("nan"), 0.5)},
    **{f"{value} logit": (non_finite(value), "no distribution at position 4") for value in (torch.nan, torch.inf)},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_samples_that_are_not_of_this_request_or_cannot_be_are_refused(prompt, wrong):
    change, words = WRONG[wrong]
    with pytest.raises(ValueError, match=words):
        read(change(*prompt, answer_of(*prompt)), prompt[1])


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
        *(("seed", 2**64), ("seed", True), ("row", -1), ("first", 2**20 + 1), ("top_k", 8), ("row", None)),
    ],
)
def test_an_impossible_request_names_its_argument(key, value):
    args = ASKED.to_args() | {f"kdtrain_{key}": value}
    with pytest.raises(ValueError, match=f"together: .*kdtrain_{key}"):
        SampleRequest.from_args({name: each for name, each in args.items() if each is not None})
