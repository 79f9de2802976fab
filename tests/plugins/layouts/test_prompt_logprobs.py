"""A cache from the log-probabilities of an inference server trains a student at T = 1, and is refused at any other."""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_a_student_learns_from_a_servers_log_probabilities(bench) -> None:
    model = AutoModelForCausalLM.from_pretrained(bench.root / "teacher").eval()
    tokenizer = AutoTokenizer.from_pretrained(bench.root / "teacher")
    records, expected = [], {}
    for path in sorted((bench.root / "corpus").iterdir()):
        tokens = tokenizer(path.read_text()[:100])["input_ids"][:33]
        with torch.no_grad():
            top = model(torch.tensor([tokens])).logits[0].log_softmax(-1).topk(8)
        ids, logprobs = top.indices[:-1].tolist(), top.values[:-1].tolist()
        expected[tuple(tokens)] = ids
        records.append({"tokens": tokens, "top_ids": [None, *ids], "top_logprobs": [None, *logprobs]})
    (bench.root / "server.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = ("server.jsonl", "--layout", "prompt-logprobs", "--teacher", "t", "--tokenizer", "teacher")
    made = bench.run("import", *options, "--seq-len", 32, "--out", "server", "--json").json
    manifest = json.loads((bench.root / "server" / "manifest.json").read_text())
    assert (manifest["temperature_range"]["min"], manifest["temperature_range"]["max"]) == (1, 1)
    assert made["rows"] == len(records)
    import kdtrain as kd

    for row in kd.Cache(bench.root / "server")["train"]:
        length = len(expected[tuple(row["tokens"].tolist())])
        assert row["ids"][:length].tolist() == expected[tuple(row["tokens"].tolist())]
    train = ("distill", "--cache", "server", "--student", "student.toml", "--steps", 2, *bench.fast, *bench.eager)
    refused = bench.run(*train, "--out", "server-run", "--temperature", 2)
    assert refused.code == 2
    assert "leave the cache's range of 1 to 1" in refused.refusal()
    assert bench.run(*train, "--out", "server-run", "--json").json["steps"] == 2
    learned = bench.run(*train, "--out", "server-learned", "--temperature", 1, "--temperature-mode", "likelihood")
    assert learned.code == 2
    assert "the cache is valid at T = 1 only; use --temperature-mode fixed" in learned.refusal()
    gone = bench.run("cache-teacher", "--teacher", "teacher", "--from-logprobs", "server.jsonl", "--out", "x")
    assert gone.code == 2
    assert "--from-logprobs is gone: use kdtrain import FILE --layout prompt-logprobs" in gone.refusal()
