"""What kdtrain's samples cost a vLLM server: `python -m benchmarks.performance.engine_samples`, on a quiet machine.

Servers of the shipped teacher run already, `vllm serve teachers/stdlib-5m --served-model-name stdlib-5m --max-logprobs
64`: one with kdtrain's plugin (`--url`) and, to see what the plugin costs other requests, one without (`--plain`). They
answer the same rows in turn with nothing but a token (`none`), with the most likely 16 and 64 entries, and with 50
samples. Each side answers all rows once a round; a figure is the median over the rounds. Bytes are those of the body of
an answer. Prompts are salted, so that none comes from a prefix cache.
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

from benchmarks.harness import ROOT, write
from benchmarks.harness.command import options
from benchmarks.harness.machine import cpu_model
from kdtrain.cache.engine_samples import SampleRequest
from kdtrain.config.values import Options, option
from kdtrain.models.loading import load_tokenizer
from kdtrain.models.spec import read_spec

RESULTS = Path(__file__).parents[1] / "results" / "engine_samples.json"
TOP = (16, 64)
SAMPLES = 50


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
    save: bool = True
    """Write the figures to benchmarks/results/engine_samples.json."""


def main(settings: Settings) -> None:
    """Ask in turn, and write the figures."""
    rows, positions = _rows(settings), settings.rows * settings.seq_len
    sides, salt = _sides(settings), os.urandom(8).hex()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    size: dict[str, float] = {}
    for number in range(-1, settings.rounds):  # the first warms up
        for name, (url, parameters) in sides.items():
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
    kept = {name: value for name, value in vars(settings).items() if name not in ("url", "plain", "save")}
    record = {"settings": kept, "cpu": cpu_model(), "figures": figures}
    print(json.dumps(record, indent=1))
    if settings.save:
        write(RESULTS, record)


def _rows(settings: Settings) -> list[list[int]]:
    text = "".join(path.read_text() for path in sorted((ROOT / "kdtrain").rglob("*.py")))
    tokens = load_tokenizer(read_spec("stdlib-5m", "teachers"))(text)["input_ids"]
    length = settings.seq_len
    return [tokens[row * length : (row + 1) * length + 1] for row in range(settings.rows)]


def _sides(settings: Settings) -> dict[str, tuple[str, Callable[[int], dict[str, Any]]]]:
    """Where each side is asked, and what it adds to a request for a row."""

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
