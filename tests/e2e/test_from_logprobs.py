"""A cache from the log-probabilities of an inference server trains a student at T = 1, and is refused at any other."""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_a_student_learns_from_a_servers_log_probabilities(bench) -> None:
    model = AutoModelForCausalLM.from_pretrained(bench.root / "teacher").eval()
    tokenizer = AutoTokenizer.from_pretrained(bench.root / "teacher")
    records = []
    for path in sorted((bench.root / "corpus").iterdir()):
        tokens = tokenizer(path.read_text()[:100])["input_ids"]
        with torch.no_grad():
            top = model(torch.tensor([tokens])).logits[0].log_softmax(-1).topk(8)
        ids, logprobs = top.indices[:-1].tolist(), top.values[:-1].tolist()
        records.append({"tokens": tokens, "top_ids": [None, *ids], "top_logprobs": [None, *logprobs]})
    (bench.root / "said.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ("--teacher", "teacher", "--from-logprobs", "said.jsonl", "--seq-len", 32, "--top-k", 8)
    made = bench.run("cache-teacher", *options, "--out", "said", "--json").json
    assert (made["temperature_range"]["min"], made["temperature_range"]["max"]) == (1, 1)
    train = ("distill", "--cache", "said", "--student", "student.toml", "--steps", 2, *bench.fast, *bench.eager)
    refused = bench.run(*train, "--out", "said-run", "--temperature", 2)
    assert refused.code == 2
    assert "leave the cache's range of 1 to 1" in refused.refusal()
    assert bench.run(*train, "--out", "said-run", "--json").json["steps"] == 2
    learned = bench.run(*train, "--out", "said-learned", "--temperature", 1, "--temperature-mode", "likelihood")
    assert learned.code == 2
    assert "the cache is valid at T = 1 only; use --temperature-mode fixed" in learned.refusal()
    fewer = bench.run("cache-teacher", *options[:-1], 9, "--out", "said-9")
    assert fewer.code == 2
    assert "has 8 entries; use --top-k 8" in fewer.refusal()
    records[0]["tokens"][3] = 5000
    (bench.root / "said.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    strange = bench.run("cache-teacher", *options, "--out", "said-5000")
    assert strange.code == 2
    assert "--from-logprobs said.jsonl has the token 5000, the teacher's vocabulary only" in strange.refusal()
