"""Text by the teacher: what it writes, what is kept of it, and why it ends."""

import copy
import functools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from kdtrain.cache.format.codec import encode, encode_sequences
from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.write.answers import ShardRows
from kdtrain.cache.write.generated_text import finish_reasons
from kdtrain.config.commands import CacheTeacherConfig
from kdtrain.config.sections import CacheParallelConfig, DataConfig, TextConfig
from kdtrain.data.corpus import has_prompts
from kdtrain.data.packing import prompt_rows
from kdtrain.errors import UsageError
from kdtrain.models.generate import draw
from kdtrain.models.head import split
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import end_tokens, ends_of, filler_token, learn_ends
from kdtrain.run import build_cache
from kdtrain.teaching import writing
from kdtrain.teaching.local import LocalTeacher
from kdtrain.teaching.teacher import Writing
from kdtrain.teaching.writing import BLOCK, continued
from kdtrain.testing import tiny_model, tiny_tokenizer
from tests.e2e.conftest import opinionated

CODEC = CodecSpec(kind="dense", vocab_size=300)
ENDS = tuple(range(0, 300, 6))
FILLER = 1
CHAT = (
    "{% for m in messages %}[{{ m['role'][0] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}"
)


def prompts_of(lengths, width=28, room=None, first=0):
    """Make random prompts of some lengths, in rows of `width` positions."""
    generator = np.random.default_rng(first)
    tokens, mask = np.full((len(lengths), width + 1), FILLER, np.int32), np.zeros((len(lengths), width), bool)
    for row, length in enumerate(lengths):
        tokens[row, :length] = generator.integers(300, size=length)
        mask[row, length - 1 :][:room] = True
    return ShardRows("train-00000", "train", first, tokens, mask, np.zeros_like(tokens[:, 1:]), {})


def how(**options):
    given = {"temperature": 1.0, "top_p": 1.0, "end_tokens": ENDS, "seed": 0, "batch_size": None}
    return Writing(**{**given, **options})


def teacher_of(shape, asked):
    """Make a teacher that writes, and its model as transformers has it."""
    model = opinionated(tiny_model(shape, 300, seed=1)).eval().requires_grad_(False)
    plain, teacher = copy.deepcopy(model), LocalTeacher.of(split(model))
    teacher.write(asked)
    return teacher, plain


def written(teacher, rows):
    """Return rows with the text of a teacher, and the logits [B, T, V] of the steps; zeros elsewhere."""
    logits_BTV = torch.zeros(*rows.loss_mask.shape, 300)

    def take(which, places, labels, logits_NV):
        assert len(which) <= BLOCK * len(rows)
        logits_BTV[which, places] = logits_NV

    assert teacher.writing is not None
    return continued(teacher._generate, rows, teacher.writing, take), logits_BTV


@pytest.mark.parametrize("lengths", [[6] * 5, [3, 9, 6, 1, 12]], ids=["one length", "several"])
@pytest.mark.parametrize("shape", ["llama", "mistral", "gpt2", "gemma2", "bloom"])
def test_greedy_text_is_that_of_transformers_and_its_logits_are_those_of_scoring_it(shape, lengths):
    rows = prompts_of(lengths, room=14)
    teacher, model = teacher_of(shape, how(temperature=0.0))
    found, logits_BTV = written(teacher, rows)
    reasons = finish_reasons(found.tokens, found.loss_mask, ENDS)
    scored_BTV = teacher.logits(torch.from_numpy(found.tokens[:, :-1].astype(np.int64)), None)
    for row, length in enumerate(lengths):
        prompt = torch.from_numpy(rows.tokens[row, :length].astype(np.int64))[None]
        settings = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": list(ENDS), "pad_token_id": FILLER}
        theirs = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)[0].numpy()
        assert found.tokens[row, : len(theirs)].tolist() == theirs.tolist()
        assert set(found.tokens[row, len(theirs) :].tolist()) <= {FILLER}
        labels = np.flatnonzero(found.loss_mask[row])
        assert labels.tolist() == [*range(length - 1, len(theirs) - 1)]  # the prompt is masked, and what is behind it
        assert reasons[row] == ("stop" if theirs[-1] in ENDS else "length")
        assert reasons[row] == "stop" or len(labels) == 14
        torch.testing.assert_close(logits_BTV[row][labels], scored_BTV[row][labels], rtol=1e-4, atol=1e-4)
    assert shape != "llama" or "stop" in reasons


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    "shape, config",
    [("gpt2", {"n_positions": 28}), ("llama", {"max_position_embeddings": 28, "rope_parameters": DYNAMIC})],
    ids=["learned", "dynamic"],
)
def test_a_row_that_has_ended_stays_inside_the_models_positions(shape, config):
    teacher = LocalTeacher.of(split(opinionated(tiny_model(shape, 300, seed=1, **config)).eval().requires_grad_(False)))
    teacher.write(how(end_tokens=()))
    found, logits_BTV = written(teacher, prompts_of([26, 12, 2]))
    scored_BTV = teacher.logits(torch.from_numpy(found.tokens[:, :-1].astype(np.int64)), None)
    here_BT = torch.from_numpy(found.loss_mask)
    assert here_BT.sum(1).tolist() == [3, 17, 27]
    torch.testing.assert_close(logits_BTV[here_BT], scored_BTV[here_BT], rtol=1e-4, atol=1e-4)


def test_what_is_drawn_depends_on_seed_split_row_and_position_alone():
    teacher, _ = teacher_of("llama", how(temperature=0.8, top_p=0.9, end_tokens=()))
    rows = prompts_of([6] * 8)
    whole, _ = written(teacher, rows)
    again, _ = written(teacher, rows[0:8])
    assert np.array_equal(whole.tokens, again.tokens)
    halves = [written(teacher, rows[start : start + 4])[0].tokens for start in (0, 4)]
    assert np.array_equal(whole.tokens, np.concatenate(halves))  # in exact arithmetic always
    teacher.write(how(temperature=0.8, top_p=0.9, end_tokens=(), seed=1))
    assert not np.array_equal(whole.tokens, written(teacher, rows)[0].tokens)


def test_draws_have_the_probabilities_of_the_temperature_and_never_leave_the_top_p():
    logits_V = torch.tensor([2.0, 0.0, 1.0, -1.0, 3.0])
    chances = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.8), (1.7, 0.5)):
        wanted_V = (logits_V / temperature).softmax(-1)
        order = wanted_V.argsort(descending=True)
        before_V = wanted_V[order].cumsum(-1) - wanted_V[order]
        wanted_V[order[before_V >= top_p]] = 0
        drawn_N = draw(logits_V.expand(20_000, 5), chances, temperature, top_p)
        shares_V = torch.bincount(drawn_N, minlength=5) / 20_000
        torch.testing.assert_close(shares_V, wanted_V / wanted_V.sum(), rtol=0, atol=1e-3)
    assert set(draw(logits_V.expand(8, 5), chances[::2500], 1e-200, 1.0).tolist()) == {4}
    impossible = torch.tensor([[-torch.inf, 0.0, -torch.inf]])
    assert [int(draw(impossible, torch.tensor([u]), 1.0, 1.0)) for u in (0.0, 0.5, 1 - 2**-32)] == [1, 1, 1]


@pytest.mark.parametrize("padded", [True, False])
def test_a_model_that_steps_with_other_logits_than_it_scores_with_is_refused(monkeypatch, padded):
    teacher, _ = teacher_of("llama", how())
    forward = teacher.model.model.forward

    def pads(mask):  # transformers 5.17 gives a mask of ones where later releases give none
        return mask is not None and not mask.all()

    @functools.wraps(forward)
    def wrong(*given, **named):
        if padded:  # padding is seen
            named["attention_mask"] = None
        elif named["input_ids"].shape[1] == 1 and not pads(named.get("attention_mask")):  # a prompt is forgotten
            named |= {"past_key_values": None, "use_cache": False}
        return forward(*given, **named)

    monkeypatch.setattr(teacher.model.model, "forward", wrong)
    with pytest.raises(UsageError, match="gives other logits one token at a time than in one forward"):
        teacher.write(how())


@pytest.mark.parametrize(
    "codec", [CODEC, CodecSpec(kind="sparse", top_k=4, num_samples=8, vocab_size=300)], ids=["dense", "sparse"]
)
def test_text_is_encoded_a_block_of_steps_at_a_time_and_labels_are_certain_where_none_was_written(codec, monkeypatch):
    teacher, _ = teacher_of("llama", how(end_tokens=()))
    settings = CacheSettings(
        codec=codec, seq_len=28, tokenizer_size=300, sampling="grid" if codec.num_samples else None
    )
    prompts, largest = prompts_of([5, 9, 5, 27]), []
    monkeypatch.setattr(writing, "BLOCK", 4)
    monkeypatch.setattr(writing, "encode", lambda *block: largest.append(len(block[0])) or encode(*block))
    rows, kept = teacher.answers(settings).rows(prompts)
    assert max(largest) <= 4 * len(prompts) and sum(largest) == 28 * len(prompts)
    arrays, mask = kept(), torch.from_numpy(rows.loss_mask)
    assert mask.sum(1).tolist() == [24, 20, 24, 2] and not arrays["broken"].any()
    _, logits_BTV = written(teacher, prompts)
    labels_BT = torch.from_numpy(rows.tokens[:, 1:].astype(np.int64))
    expected_BT = logits_BTV.log_softmax(-1).gather(2, labels_BT[..., None])[..., 0].where(mask, 0.0)
    torch.testing.assert_close(torch.from_numpy(arrays["label_logprob"]).float(), expected_BT, rtol=0, atol=2e-3)
    whole = encode_sequences(logits_BTV, labels_BT, codec, seed=0, split="train", first=0)
    assert whole.keys() == arrays.keys()
    for name, values in arrays.items():
        assert values.dtype == whole[name].dtype
        assert name == "broken" or np.array_equal(values[rows.loss_mask], whole[name][rows.loss_mask])


def prompts_in(data, tokenizer, number):
    """Return the whole prompts that some rows of the data give."""
    rows = list(prompt_rows(data, "train", tokenizer, number, filler=FILLER, prompt_tokens=None, max_new_tokens=None))
    assert all(row.loss_mask[row.loss_mask.argmax() :].all() for row in rows)
    assert all(tokenizer.eos_token_id not in row.tokens for row in rows)  # what is quoted is spelled
    return [tokenizer.decode(row.tokens[: int(row.loss_mask.argmax()) + 1]) for row in rows]


def test_prompts_of_text_are_the_beginnings_of_its_sequences(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {n}\n" for n in range(200)))
    data = DataConfig(data=str(tmp_path / "text.txt"), seq_len=30, num_workers=0)
    tokenizer, how_long = tiny_tokenizer(), {"prompt_tokens": 8, "max_new_tokens": 10}
    rows = list(prompt_rows(data, "train", tokenizer, 3, filler=FILLER, **how_long))
    assert [tokenizer.decode(row.tokens[:8]) for row in rows] == ["line 0\nl", "ne 4\nlin", " 8\nline "]
    for row in rows:
        assert set(row.tokens[8:].tolist()) == {FILLER}
        assert np.flatnonzero(row.loss_mask).tolist() == [*range(7, 17)]
    for length, wide in ((30, 15), (1000, 64)):  # of the prompts, where nothing else is asked
        asked = CacheTeacherConfig(
            teacher="t", out="o", data=replace(data, seq_len=length), text=TextConfig(generate=True)
        )
        assert build_cache._prompt_width(asked.data, asked.text) == wide


def test_prompts_of_conversations_end_where_the_last_answer_begins(tmp_path, caplog):
    turns = [("user", "hi"), ("assistant", "yes"), ("user", "why <|endoftext|>?"), ("assistant", "because")]
    long = [("user", "w" * 60), ("assistant", "ok")]
    with open(tmp_path / "chat.jsonl", "w") as file:
        for number, each in enumerate([turns, long, turns[:3]] * 8):  # equal rows would share a split
            messages = [{"role": role, "content": content.replace("hi", f"hi {number}")} for role, content in each]
            messages[0]["content"] += " " * number * (each is long)
            file.write(json.dumps({"messages": messages}) + "\n")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    data = DataConfig(
        data=str(tmp_path / "chat.jsonl"), messages_column="messages", seq_len=50, num_workers=0, split="train"
    )
    prompts = {re.sub(r" \d+", "", each) for each in prompts_in(data, tokenizer, None)}
    assert prompts == {"[u]hi\n[a]yes\n[u]why <|endoftext|>?\n[a]"}  # of both that fit: one has no last answer
    assert "conversations whose prompt fills --seq-len 50" in caplog.text


THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% if loop.last %}<think></think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("asked", [["a"], ["a", "b"]])
def test_a_template_opens_an_answer_without_the_thoughts_of_the_one_in_the_data(tmp_path, marked, asked):
    messages = [
        {"role": role, "content": text}
        for each in asked
        for role, text in (("user", each), ("assistant", "x</think>y"))
    ]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 12)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKS
    if marked:  # from the thoughts on
        begins, ends = "{% if loop.last %}<think>", "{% else %}{{ m.content }}"
        tokenizer.chat_template = THINKS.replace(begins, "{% generation %}" + begins).replace(
            ends, "{% endgeneration %}" + ends
        )
    data = DataConfig(data=str(tmp_path / "chat.jsonl"), messages_column="messages", seq_len=80, num_workers=0)
    before = {1: "<user>a<assistant>", 2: "<user>a<assistant>y<user>b<assistant>"}[len(asked)]
    assert prompts_in(data, tokenizer, 1) == [before]


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"instruction": "add", "input": "1 1", "output": "2"}, "[u]add\n\n1 1\n[a]"),
        ({"prompt": "one two ", "completion": "three"}, "one two "),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, "[u]hi\n[a]"),
        ({"instruction": "add", "output": ""}, "[u]add\n[a]"),
        ({"instruction": "add"}, "[u]add\n[a]"),
        ({"prompt": "one two "}, "one two "),
        ({"prompt": [{"role": "user", "content": "hi"}]}, "[u]hi\n[a]"),
        ({"messages": [{"role": "user", "content": "hi"}]}, "[u]hi\n[a]"),
        (
            {"messages": [{"role": each, "content": each[0]} for each in ("user", "assistant", "user")]},
            "[u]u\n[a]a\n[u]u\n[a]",
        ),
    ],
    ids=[
        *("alpaca", "prompt-completion", "sharegpt", "alpaca without output", "alpaca without its column"),
        *("prompt", "prompt of messages", "messages", "a later question"),
    ],
)
def test_rows_of_every_format_give_the_prompt_before_their_last_answer(tmp_path, row, prompt):
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 12)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    data = DataConfig(data=str(tmp_path / "rows.jsonl"), seq_len=50, num_workers=0)
    assert has_prompts(data)
    assert prompts_in(data, tokenizer, 2) == [prompt, prompt]
    config = CacheTeacherConfig(teacher="t", out="o", data=data, text=TextConfig(generate=True, prompt_tokens=3))
    with pytest.raises(UsageError, match=r"--prompt-tokens has no effect: .* has prompts of its own"):
        build_cache._prompt_width(config.data, config.text)


def test_conversations_that_the_template_refuses_are_counted_and_refused_if_none_is_left(tmp_path, caplog):
    turns = [[("user", "hi"), ("assistant", "yes")], [("system", "be"), ("user", "hi"), ("assistant", "yes")]]
    chat = [{"messages": [{"role": role, "content": content} for role, content in each]} for each in turns]
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
    )
    for name, rows in (("some", chat), ("all", chat[1:])):
        text = "".join(json.dumps(each).replace("hi", f"hi {number}") + "\n" for number in range(30) for each in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    some = DataConfig(data=str(tmp_path / "some.jsonl"), seq_len=50, num_workers=0)
    assert prompts_in(some, tokenizer, None)
    assert "conversations that the chat template refuses" in caplog.text
    none = replace(some, data=str(tmp_path / "all.jsonl"))
    with pytest.raises(UsageError, match="no system"):
        prompts_in(none, tokenizer, None)


def test_an_end_is_one_event_whichever_token_writes_it(tmp_path):
    tokenizer, student = tiny_tokenizer(300), tiny_model("llama", 300)
    student.generation_config.eos_token_id = 299
    assert learn_ends(student, (299,), tokenizer) is None
    line = learn_ends(student, (257, 299), tokenizer)
    assert "end with 257 (<|unused-257|>), 299 (<|endoftext|>), the student's own with 299 (<|endoftext|>)" in line
    assert end_tokens(student.generation_config) == (257, 299)
    assert end_tokens(None, tokenizer) == (299,) and end_tokens(None) == ()
    assert filler_token(tokenizer, (0, 1, 299)) == 2
    tokenizer.pad_token = "<|unused-260|>"
    assert filler_token(tokenizer, (0, 299)) == 260 and filler_token(tokenizer, (0, 260)) == 1


def test_a_text_ends_at_the_tokens_of_the_weights_too_where_the_tokenizer_is_of_another_model(tmp_path):
    for name, ends in (("base", 3), ("instruct", [5, 7])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    places = {"tokenizer": str(tmp_path / "base"), "source": str(tmp_path / "instruct")}
    spec = replace(ModelSpec.read("stdlib-5m", "teachers"), **places)
    assert ends_of(spec, tiny_tokenizer(300)) == (3, 5, 7, 299)
    assert ends_of(replace(spec, tokenizer=None), None) == (5, 7)


def test_options_that_do_not_go_with_text_by_the_teacher_are_refused_by_name():
    def asked(text, **options):
        return CacheTeacherConfig(teacher="t", out="o", text=TextConfig(generate=True, **text), **options)

    data = DataConfig(data="text.txt", seq_len=32)
    chat = DataConfig(data="text.jsonl", messages_column="messages")
    for refused, make in {
        "--prompt-tokens has no effect without --generate": lambda: TextConfig(prompt_tokens=3),
        "--prompt-tokens 32 leaves no room": lambda: asked({"prompt_tokens": 32}, data=data),
        "--prompt-tokens has no effect with --messages-column": lambda: asked({"prompt_tokens": 3}, data=chat),
        "--document-mask has no effect": lambda: asked({}, data=DataConfig(data="a", document_mask=True)),
        "--refine takes its text from its cache": lambda: asked({}, refine="cache"),
        "leave --teacher-parallel fsdp out": lambda: asked(
            {}, data=chat, parallel=CacheParallelConfig(teacher_parallel="fsdp")
        ),
    }.items():
        with pytest.raises(UsageError, match=refused):
            make()


@pytest.mark.parametrize("found", ["all", {}, {"end_tokens": ["0"]}, {"end_tokens": [300]}, {"end_tokens": [-1]}])
def test_end_tokens_of_a_strangers_cache_are_ids_of_its_vocabulary(found):
    settings = CacheSettings(codec=CODEC, seq_len=4, tokenizer_size=300, data={"generated": found})
    with pytest.raises(ValueError):
        _ = settings.end_tokens
    assert replace(settings, data={}).end_tokens == ()
