"""A round for a loop of one's own, and files of answers that another program wrote."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import kdtrain as kd
from kdtrain.config.sections import DataConfig
from kdtrain.data.packed import PackedRow
from kdtrain.errors import UsageError
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.plugins.rounds import command
from kdtrain.plugins.rounds.answers import PromptReader, read_answers, rows_of
from kdtrain.plugins.rounds.plan import RoundWriter
from kdtrain.teaching.local import SelfTeacher
from kdtrain.teaching.teacher import Writing
from kdtrain.testing import tiny_model, tiny_tokenizer, write_model_folder

POLICY = {"spec": "own", "round": 1, "attempt": 1}
HOW = Writing(temperature=1.0, top_p=1.0, end_tokens=(299,), seed=0, batch_size=4, policy=POLICY)
ROOT = Path(__file__).parents[3]
PROMPTS = ["def read", [5, 6, 7], "class A", "import os"]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer(300)


def test_a_round_for_ones_own_loop_has_what_the_student_wrote_and_both_log_probabilities(tokenizer, tmp_path):
    student, teacher = tiny_model("llama", 300, seed=1).eval(), tiny_model("llama", 300, seed=2).eval()
    how = {"tokenizer": tokenizer, "max_new_tokens": 6, "top_k": 4, "folder": tmp_path / "round"}
    data = kd.rollouts(student, teacher, PROMPTS, **how)
    batch = data.read(range(4))
    policy, theirs = (each.view_as(batch.loss_mask) for each in (batch.targets.policy, batch.targets.label_logprob))
    for model, found, atol in (student, policy, 1e-4), (teacher, theirs, 0.02):
        with torch.no_grad():
            logprobs = model(batch.tokens[:, :-1]).logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
        torch.testing.assert_close(found[batch.loss_mask], logprobs[batch.loss_mask], rtol=0.01, atol=atol)
    rows = zip(batch.tokens, batch.loss_mask, strict=True)
    starts = {tuple(row[: int(mask.int().argmax()) + 1].tolist()) for row, mask in rows}
    assert (5, 6, 7) in starts and tuple(tokenizer.encode("class A", add_special_tokens=False)) in starts
    there = kd.rollouts(student, teacher, PROMPTS, **how)
    other = kd.rollouts(student, teacher, PROMPTS, **how | {"folder": None, "number": 2})
    assert torch.equal(there.read(range(4)).tokens, batch.tokens)
    assert not torch.equal(other.read(range(4)).tokens, batch.tokens)
    trained = kd.Student(student, kd.DistillationLoss(alpha=0.0)).train()
    output = trained(**kd.collate([data[0], data[1]]))
    assert output.loss.item() == pytest.approx(float(output.kd / output.tokens), rel=1e-5)  # alpha is 1 on it
    with pytest.raises(UsageError, match="holds"):
        kd.rollouts(student, teacher, PROMPTS, **how | {"seed": 1})
    with pytest.raises(UsageError, match="holds"):
        kd.rollouts(student, teacher, ["open", *PROMPTS[1:]], **how)
    with pytest.raises(UsageError, match="eval"):
        kd.rollouts(student, teacher.train(), PROMPTS, **how)
    with pytest.raises(UsageError, match="prompt 1"):
        kd.rollouts(student, teacher.eval(), ["a", 3], **how)


def test_rounds_need_a_teacher_that_is_whole_on_each_rank():
    with pytest.raises(UsageError, match="--on-policy needs the whole teacher on each rank"):
        RoundWriter.meet(SimpleNamespace(teacher=None), tiny_model("llama", 300), SimpleNamespace(sharded=True))


def test_a_command_that_is_interrupted_takes_what_it_started_with_it(tmp_path):
    (tmp_path / "engine.sh").write_text("sleep 60 & echo $! > $1; wait")
    begun = tmp_path / "number"
    words = f"sh {tmp_path / 'engine.sh'} {{out}}"
    with pytest.raises(KeyboardInterrupt):
        command._run(words, {"{out}": begun}, lambda: begun.exists() and begun.read_text().strip() != "")
    state = Path(f"/proc/{begun.read_text().strip()}/stat")
    for _ in range(600):  # a killed process takes a moment to end on a busy machine
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("what the command started is still there")


def test_a_command_reads_the_exported_student_which_is_gone_afterwards_and_its_answers_stay(tokenizer, tmp_path):
    model = tiny_model("llama", 300)
    write_model_folder(tmp_path / "own", model, tokenizer)
    engine = "cat $1/model.safetensors $1/tokenizer.json > /dev/null && sed 's/.*/{\"answer\": [7, 8, 9]}/' $2 > $3"
    (tmp_path / "engine.sh").write_text(engine)
    reader, path = PromptReader(tokenizer, (299,), 8), tmp_path / "answers" / "round-0001.jsonl"
    rows = {
        split: [PackedRow.prompt([5, 6], seq_len=8, max_new_tokens=2, filler=299)] for split in ("train", "validation")
    }
    for words in (f"sh {tmp_path / 'engine.sh'} {{model}} {{prompts}} {{out}}", "false"):  # the second reads the file
        found = command.write_elsewhere(words, path, model, tmp_path / "own", reader, rows, HOW, lambda: False)
        assert [each.tokens[:4].tolist() for split in rows for each in found[split]] == [[5, 6, 7, 8]] * 2
    assert sorted(each.name for each in path.parent.iterdir()) == ["round-0001.jsonl", "round-0001.prompts"]


VLLM = """
import json
from dataclasses import asdict, dataclass
from types import SimpleNamespace

@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: list[int] | None = None
    detokenize: bool = True

class LLM:
    def __init__(self, model, *, gpu_memory_utilization=0.9):
        open(f"{model}/config.json").close()

    def generate(self, prompts, sampling_params):
        with open("params.jsonl", "w") as file:
            file.writelines(json.dumps(asdict(each)) + "\\n" for each in sampling_params)
        ids = [(*each["prompt_token_ids"][::-1], 299)[: how.max_tokens] for each, how in zip(prompts, sampling_params)]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=each)]) for each in ids]
"""
"""A module with what the example uses of vLLM."""


def test_the_script_for_vllm_draws_each_answer_as_the_run_states(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    model, reader = tiny_model("llama", 300), PromptReader(tokenizer, (299,), 8)
    write_model_folder(tmp_path / "own", model, tokenizer)
    prompts = {"train": [[5, 6], [7]], "validation": [[5, 6]]}
    rows = {
        split: [PackedRow.prompt(row, seq_len=8, max_new_tokens=3, filler=299) for row in each]
        for split, each in prompts.items()
    }
    words = f"{sys.executable} {ROOT / 'examples' / 'write_with_vllm.py'} {{model}} {{prompts}} {{out}}"
    how = replace(HOW, temperature=0.7, top_p=0.9)
    path = tmp_path / "answers" / "round-0001.jsonl"
    found = command.write_elsewhere(words, path, model, tmp_path / "own", reader, rows, how, lambda: False)
    answers = [row.tokens[1:][row.loss_mask].tolist() for row in found["train"]]
    assert answers == [[6, 5, 299], [7, 299]] and len(found["validation"]) == 1
    params = [json.loads(line) for line in (tmp_path / "params.jsonl").read_text().splitlines()]
    stated = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 3, "stop_token_ids": [299], "detokenize": False}
    assert all(stated.items() <= each.items() for each in params) and len({each["seed"] for each in params}) == 3


def written(path, *lines):
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines))
    return path


def test_answers_are_texts_or_ids_and_end_where_they_say_so(tokenizer, tmp_path):
    ids = tokenizer.encode(" the file", add_special_tokens=False)
    lines = [
        {"prompt": "open", "answer": " the file", "split": "train"},
        {"prompt": "open", "answer": " the file", "finish_reason": "length", "split": "train"},
        {"prompt": [5, 6], "answer": ids, "split": "validation", "unknown": 1},
        {"prompt": [5] * 17, "answer": ids},
        {"prompt": [5] * 16, "answer": ids, "split": "validation"},
    ]
    found = read_answers(written(tmp_path / "a.jsonl", *lines), PromptReader(tokenizer, (299,), 16))
    train, validation = ([row.tokens[1:][row.loss_mask].tolist() for row in each] for each in found.rows.values())
    assert train == [[*ids, 299], ids] and validation == [ids, ids[:1]]
    assert not found.known and found.policy is None
    assert len(read_answers(tmp_path / "a.jsonl", PromptReader(tokenizer, (299,), 16), 2).rows["train"][0].kept) == 0
    known = [{**each, "logprobs": [-0.5] * len(ids), "policy": "mine"} for each in lines[1:3]]
    known.append({"prompt": "a", "answer": [7, 8], "logprobs": [-1, -2.5], "policy": "mine"})
    found = read_answers(written(tmp_path / "b.jsonl", *known), PromptReader(tokenizer, (299,), 16))
    assert found.policy == "mine" and found.known
    known_rows = found.rows
    lines = [{**each, "teacher_prompt": [9, 8, 7]} for each in lines[:3]]
    found = read_answers(written(tmp_path / "c.jsonl", *lines), PromptReader(tokenizer, (299,), 16))
    assert found.rows["train"][0].kept["teacher_prompt"].tolist() == [9, 8, 7] + 13 * [-1]
    rows = [row for each in known_rows.values() for row in each]
    assert [-1, -2.5] in [row.kept["policy_logprob"][row.loss_mask].tolist() for row in rows]


GOOD = {"prompt": "open", "answer": [7, 8], "logprobs": [-1.0, -2.0]}


@pytest.mark.parametrize(
    "line, text",
    [
        ("no json", "line 2: not JSON"),
        ([1], "line 2 is not a prompt with its answer"),
        ({"prompt": "a"}, "line 2 is not a prompt with its answer"),
        ({**GOOD, "prompt": None}, "line 2: prompt and answer must be texts or ids"),
        ({**GOOD, "prompt": [{"role": "user"}]}, "line 2: prompt and answer must be"),
        ({**GOOD, "answer": ""}, "line 2 has 2 logprobs for the 1 tokens"),
        ({**GOOD, "answer": [300, 1]}, "line 2: prompt and answer must be"),
        ({**GOOD, "answer": []}, "line 2: prompt and answer must be"),
        ({**GOOD, "logprobs": [-1.0]}, "line 2 has 1 logprobs for the 2 tokens"),
        ({**GOOD, "logprobs": [0.5, -1.0]}, "line 2 is not a prompt with its answer"),
        ({**GOOD, "logprobs": None}, "line 2 is of another policy than the lines before, or has logprobs"),
        ({**GOOD, "policy": "other"}, "line 2 is of another policy"),
        ({**GOOD, "teacher_prompt": "a"}, "or a teacher_prompt where they do not"),
        ({**GOOD, "split": "test"}, "line 2 is not a prompt with its answer"),
        (GOOD, "has 2 answers that can be used, and 3 are needed"),
    ],
)
def test_a_bad_line_of_answers_is_named(tokenizer, tmp_path, line, text):
    path = written(tmp_path / "bad.jsonl", GOOD, line)
    with pytest.raises(UsageError, match=text) as raised:
        read_answers(path, PromptReader(tokenizer, (299,), 16))
    assert str(path) in str(raised.value)


def test_a_file_without_an_answer_for_a_split_is_refused(tokenizer, tmp_path):
    path = written(tmp_path / "a.jsonl", *[{**GOOD, "split": "train"}] * 3)
    with pytest.raises(UsageError, match=r"a\.jsonl has no answer for validation; give some that split"):
        read_answers(path, PromptReader(tokenizer, (299,), 16))


def test_a_student_that_teaches_itself_refuses_what_is_longer_than_its_positions(tmp_path):
    write_model_folder(tmp_path, tiny_model("llama", 300), tiny_tokenizer(300))
    positions = tiny_model("llama", 300).config.max_position_embeddings
    teacher = SelfTeacher(ModelSpec(name="own", source=str(tmp_path)), torch.device("cpu"), "fp32")
    teacher.check(positions, False)
    with pytest.raises(UsageError, match=f"--seq-len {positions + 1} is beyond the {positions} positions of own"):
        teacher.check(positions + 1, False)


def test_answers_to_given_prompts_come_in_their_order(tokenizer, tmp_path):
    asked = [
        {"prompt": "a", "tokens": [5], "max_tokens": 2, "split": "train"},
        {"prompt": "b", "tokens": [6], "max_tokens": 9, "split": "validation"},
    ]
    lines = [{"answer": [7, 8, 9]}, {"prompt": "b", "answer": [7, 8, 9]}]
    found = read_answers(written(tmp_path / "a.jsonl", *lines), PromptReader(tokenizer, (299,), 16), prompts=asked)
    assert [found.rows[name][0].loss_mask.sum() for name in ("train", "validation")] == [2, 3]
    for swapped, text in ((lines[::-1], "line 1 answers another prompt"), (lines[:1], "1 answers that can be used")):
        path = written(tmp_path / "b.jsonl", *swapped)
        with pytest.raises(UsageError, match=text):
            read_answers(path, PromptReader(tokenizer, (299,), 16), prompts=asked)
    with pytest.raises(UsageError, match="line 3 answers another prompt"):
        read_answers(
            written(tmp_path / "c.jsonl", *lines, lines[0]), PromptReader(tokenizer, (299,), 16), prompts=asked
        )


def test_an_answer_that_has_other_tokens_behind_the_teachers_prompt_is_left_out_and_counted(tmp_path, caplog):
    merging = load_tokenizer(ROOT / "teachers" / "stdlib-5m")  # the tiny one has a token for each byte
    lines = [{"prompt": f"a{n}", "completion": " return self", "teacher_prompt": f"b {n}"} for n in range(30)]
    lines += [{"prompt": f"c{n} ", "completion": "return self", "teacher_prompt": f"d{n}\n"} for n in range(30)]
    lines += [{"prompt": "e " * 40, "completion": "return", "teacher_prompt": f"e{n} "} for n in range(30)]
    data = DataConfig(data=str(written(tmp_path / "a.jsonl", *lines)), seq_len=24)
    reader = PromptReader(merging, (merging.eos_token_id,), 24, opening=False)
    rows = [*rows_of(data, "train", reader, True, None)]
    texts = {merging.decode(row.tokens[1:][row.loss_mask]).replace("<|endoftext|>", "") for row in rows}
    assert texts == {" return self"} and 20 < len(rows) <= 30
    prompts = [merging.decode(row.tokens[: int(row.loss_mask.argmax()) + 1]) for row in rows]
    own = [merging.decode(row.kept["teacher_prompt"][row.kept["teacher_prompt"] >= 0]) for row in rows]
    assert own == [each.replace("a", "b ") for each in prompts]
    left = [each for each in caplog.messages if "left out" in each]
    assert "rows of the train data whose answer has other tokens behind the teacher's prompt" in left[0]
    assert "fills --seq-len 24" in left[1]
