"""What is attacked: tiny models, text, and a cache, a run and an exported student made of them by the real commands."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from benchmarks.harness import write_spec
from tests.hostile.server import Runner

TEXT = ("--seq-len", "32", "--num-workers", "0", "--num-sequences", "24", "--validation-sequences", "8")
"""How text becomes a cache of two shards of train and one of validation."""
BUILD = (*TEXT, "--precision", "fp32", "--sequences-per-shard", "16", "--json")
SPARSE = ("--top-k", "4", "--num-samples", "6")
SHORT = ("--batch-size", "4", "--no-compile", "--precision", "fp32", "--log-to", "none", "--num-workers", "0")
"""How a student is trained."""
TRAIN = (*SHORT, "--warmup-steps", "0", "--checkpoint-freq", "2", "--eval-freq", "2", "--log-freq", "1", "--json")
_CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


def make(folder: Path, run: Runner) -> dict[str, Any]:
    """Make everything in `folder`; what the sound commands print, by name."""
    folder.mkdir()
    _models(folder)
    _texts(folder)
    commands = {
        "cache": ("cache-teacher", "--teacher", "teacher", "--data", "corpus", "--out", "cache", *BUILD, *SPARSE),
        "run": ("distill", "--cache", "cache", "--student", "student.toml", "--out", "run", "--steps", "4", *TRAIN),
        "model": ("export", "run", "--out", "model", "--json"),
        "evaluate": ("evaluate", "--student", "model", "--cache", "cache", "--batch-size", "8", "--json"),
    }
    printed = {}
    for name, argv in commands.items():
        done = run(argv, folder, {})
        assert done.code == 0, f"kdtrain {' '.join(argv)} ended with {done.code}: {done.stderr}"
        printed[name] = json.loads(done.stdout)
    shutil.copytree(folder / "cache", folder / "unfinished")
    for name in ("manifest.json", "index.h5", "shards/train-00001.h5", "shards/train-00001.json"):
        (folder / "unfinished" / name).unlink()
    return printed


def _models(folder: Path) -> None:
    import torch

    from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = _CHAT
    teacher = tiny_model("llama", 300, seed=1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(6 if parameter.ndim > 1 else 1)  # distributions that are far from even
    write_model_folder(folder / "teacher", teacher, tokenizer)
    write_spec(folder / "student.toml", "teacher", SHAPES["llama"] | {"num_hidden_layers": 1})


def _texts(folder: Path) -> None:
    choose = random.Random(5)
    (folder / "corpus").mkdir()
    for name in "abcdef":
        text = "".join(choose.choice("abcdefgh \n") for _ in range(4_000))
        (folder / "corpus" / f"{name}.txt").write_text(text)
    with open(folder / "chat.jsonl", "w") as file:
        for number in range(40):
            turns = [{"role": "user", "content": f"why {number}?"}, {"role": "assistant", "content": "because. " * 5}]
            file.write(json.dumps({"messages": turns, "text": "some text " * 9}) + "\n")
    with open(folder / "logprobs.jsonl", "w") as file:
        for _ in range(30):
            tokens = [choose.randrange(97, 105) for _ in range(40)]
            ids = [None] + [[token, (token + 1) % 300, (token + 2) % 300] for token in tokens[1:]]
            logprobs = [None] + [[-0.5, -1.5, -3.0]] * 39
            file.write(json.dumps({"tokens": tokens, "top_ids": ids, "top_logprobs": logprobs}) + "\n")
