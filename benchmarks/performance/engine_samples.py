"""What kdtrain's samples cost a vLLM server: `python -m benchmarks.performance.engine_samples`, on a quiet machine.

Servers of the shipped teacher run already, `vllm serve teachers/stdlib-5m --served-model-name stdlib-5m --max-logprobs
64`: one with kdtrain's plugin (`--url`) and, to see what the plugin costs other requests, one without (`--plain`). They
answer the same rows in turn with nothing but a token (`none`), with the label's log p alone (`top-0`), with the most
likely 16 and 64 entries, and with 50 samples. Each side answers all rows once a round; a figure is the median over the
rounds. Two processes of one server differ by a tenth in speed: start both anew and measure again, and the record keeps
each time. Bytes are those of the body of an answer. Prompts are salted, so that none comes from a prefix cache.
`--model NAME` is another model that is served: its vocabulary must hold the shipped one's ids, which are sent.

`--students FOLDER` measures what students learn from it instead: one text, captured as 50 samples of the server with
the plugin, as 50 samples of the local teacher, and as the 64 most likely entries of the other server, all in fp32; and
students of each, by seed (`--text`, `--train`). It says in how many positions both samples are equal, entry by entry.
Caches and students stay in FOLDER, and the same command finishes what is missing.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import torch

from benchmarks.harness import ROOT, STUDENT, TEACHER, write
from benchmarks.harness.command import kdtrain, options
from benchmarks.harness.machine import cpu_model
from benchmarks.harness.timing import turns
from kdtrain.config.values import Options, option
from kdtrain.library import Cache
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.plugins.served.engine_samples import SampleRequest

RESULTS = Path(__file__).parents[1] / "results" / "engine_samples.json"
TOP = (0, 16, 64)
"""Entries beside the label's log p; 0 is the least that a server gives of log-probabilities."""
SAMPLES = 50
FP32 = ("--precision", "fp32", "--device", "cpu")


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """Measure positions a second and bytes a position of a served teacher."""

    url: str = "http://127.0.0.1:8765"
    """The server with the plugin."""
    plain: str | None = None
    """One without it."""
    model: str = "stdlib-5m"
    """The model's name there."""
    rounds: int = option(5, least=1)
    """Times that each side answers all rows."""
    rows: int = option(16, least=1)
    """Prompts a round."""
    seq_len: int = option(512, least=8)
    """Positions of a prompt."""
    at_once: int = option(4, least=1)
    """Requests under way."""
    students: Path | None = None
    """A folder: train students there instead, and compare their validation losses."""
    text: str = "--data stdlib --seq-len 256 --num-sequences 2048 --validation-sequences 64"
    """Which text the caches of --students are of."""
    train: str = "--steps 400 --batch-size 16 --lr 3e-3"
    """How its students are trained."""
    seeds: int = option(3, least=1)
    """Students of each cache."""
    save: bool = True
    """Write the figures to benchmarks/results/engine_samples.json, beside those of the other section."""


def main(settings: Settings) -> None:
    """Measure one of the two sections, and write it."""
    name = "throughput" if settings.students is None else "students"
    found = _throughput(settings) if settings.students is None else _students(settings, settings.students)
    print(json.dumps(found, indent=1))
    if settings.save:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        found |= {"cpu": cpu_model()}
        write(RESULTS, {**known, name: found if settings.students else [*known.get(name, []), found]})


def _students(settings: Settings, out: Path) -> dict[str, Any]:
    common = ("--teacher", TEACHER, *settings.text.split())
    served = ("--server-model", settings.model, "--teacher-server")
    sides = {
        "served samples": (*common, *served, settings.url, "--num-samples", f"{SAMPLES}"),
        "local samples": (*common, *FP32, "--num-samples", f"{SAMPLES}"),
        f"served top-{TOP[-1]}": (*common, *served, settings.plain or settings.url, "--top-k", f"{TOP[-1]}"),
    }
    caches = {name.replace(" ", "-"): words for name, words in sides.items()}
    made = {name: kdtrain("cache-teacher", *words, "--out", f"{out / name}") for name, words in caches.items()}
    of: dict[str, list[float]] = {name: [] for name in caches}
    for name in caches:
        for seed in range(settings.seeds):
            words = ("--student", STUDENT, *FP32, *settings.train.split(), "--out", f"{out / name}-{seed}")
            done = kdtrain("distill", "--cache", f"{out / name}", *words, "--seed", f"{seed}")
            of[name].append(done["last_validation_loss"])
    return {
        "settings": {"text": settings.text, "train": settings.train, "seeds": settings.seeds},
        "equal_samples": _equal(*(Cache(out / name) for name in [*caches][:2])),
        "students": {
            name: {
                "validation_losses": each,
                "mean": round(statistics.mean(each), 5),
                "bytes_per_token": round(made[name]["bytes_per_token"], 1),
                **({"capture": made[name]["capture"]} if "capture" in made[name] else {}),
            }
            for name, each in of.items()
        },
    }


def _equal(one: Cache, other: Cache) -> dict[str, Any]:
    """Compute the share of positions of the training split at which two caches hold the same samples as often."""
    same = total = 0
    for start in range(0, len(one["train"]), 16):
        rows = range(start, min(start + 16, len(one["train"])))
        found = []
        for cache in (one, other):
            targets: Any = cache["train"].read(rows).targets
            order = targets.ids.masked_fill(targets.counts == 0, targets.ids.max() + 1).sort(-1)
            found.append((order.values, targets.counts.gather(-1, order.indices)))
        equal_NK = torch.stack([a == b for a, b in zip(*found, strict=True)]).all(0)
        same, total = same + int(equal_NK.all(-1).sum()), total + len(equal_NK)
    return {"share": round(same / total, 5), "positions": total}


def _throughput(settings: Settings) -> dict[str, Any]:
    rows, positions = _rows(settings), settings.rows * settings.seq_len
    sides, salt = _sides(settings), os.urandom(8).hex()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    size: dict[str, float] = {}
    for number, (name, (url, parameters)) in turns([*sides.items()], settings.rounds, warm=1):
        started = time.monotonic()
        with ThreadPoolExecutor(settings.at_once) as threads:
            bodies = [
                {"model": settings.model, "prompt": each, "cache_salt": f"{salt}{number}{name}", **parameters(row)}
                for row, each in enumerate(rows)
            ]
            lengths = list(threads.map(lambda body, url=url: len(_post(url, body).content), bodies))
        if number >= 0:
            seconds[name].append(time.monotonic() - started)
        size[name] = sum(lengths) / positions
    figures = {
        name: {
            "positions_per_second": [round(positions / each, 1) for each in found],
            "median": round(positions / statistics.median(found), 1),
            "bytes_per_position": round(size[name], 1),
        }
        for name, found in seconds.items()
    }
    kept = {name: vars(settings)[name] for name in ("model", "rounds", "rows", "seq_len", "at_once")}
    return {"settings": kept, "figures": figures}


def _rows(settings: Settings) -> list[list[int]]:
    text = "".join(path.read_text() for path in sorted((ROOT / "kdtrain").rglob("*.py")))
    tokens = load_tokenizer(ModelSpec.read("stdlib-5m", "teachers"))(text)["input_ids"]
    length = settings.seq_len
    return [tokens[row * length : (row + 1) * length + 1] for row in range(settings.rows)]


def _sides(settings: Settings) -> dict[str, tuple[str, Callable[[int], dict[str, Any]]]]:
    """Return for each side the address that is asked, and a function that gives the parameters for a row."""

    def samples(row: int) -> dict[str, Any]:
        asked = SampleRequest(number=SAMPLES, seed=0, split="train", row=row)
        return {"prompt_logprobs": 0, "vllm_xargs": asked.to_args()}

    def top(number: int) -> Callable[[int], dict[str, Any]]:
        return lambda row: {"prompt_logprobs": number}

    plain: dict[str, Callable[[int], dict[str, Any]]] = {"none": lambda row: {}}
    plain |= {f"top-{number}": top(number) for number in TOP}
    sides = {f"samples-{SAMPLES}": (settings.url, samples)}
    for name, parameters in plain.items():
        sides[name] = settings.url, parameters
        if settings.plain:
            sides[f"{name}, without the plugin"] = settings.plain, parameters
    return sides


def _post(url: str, body: dict[str, Any]) -> requests.Response:
    answer = requests.post(f"{url}/v1/completions", json={"max_tokens": 1, "temperature": 1.0} | body, timeout=600)
    if answer.status_code != 200:
        raise SystemExit(f"{url}: {answer.status_code} {answer.text[:500]}")
    return answer


if __name__ == "__main__":
    main(options(Settings))
