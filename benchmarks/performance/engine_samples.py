"""What kdtrain's samples cost a vLLM server: `python -m benchmarks.performance.engine_samples --url URL`.

A running server that serves the shipped teacher, `vllm serve teachers/stdlib-5m --served-model-name stdlib-5m
--max-logprobs 64`, answers the same rows in turn with nothing but a token (`none`), with the most likely 16 and 64
entries, and, if it has kdtrain's plugin, with 50 samples. Each side answers all rows once a round; a figure is the
median over the rounds. Bytes are those of the body of the answer.

What the plugin costs other requests shows in `none` and `top-k` of a server with it and of one without: `--label` names
the server in the record, which holds both. The prompts of a round are salted, so that none is in a prefix cache.
"""

import json
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
    """The server."""
    label: str = "with plugin"
    """Its name in the record."""
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
    """Add the figures to benchmarks/results/engine_samples.json."""


def main(settings: Settings) -> None:
    """Ask in turn, and write the figures."""
    rows, sides = _rows(settings), _sides(settings)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    size: dict[str, float] = {}
    for number in range(-1, settings.rounds):  # the first warms up
        for name, parameters in sides.items():
            started = time.monotonic()
            with ThreadPoolExecutor(settings.at_once) as threads:
                asked = [(settings, rows[row], parameters(row), f"{number}-{name}-{row}") for row in range(len(rows))]
                lengths = list(threads.map(lambda each: _ask(*each), asked))
            if number >= 0:
                seconds[name].append(time.monotonic() - started)
            size[name] = sum(lengths) / (settings.rows * settings.seq_len)
    positions = settings.rows * settings.seq_len
    figures = {
        name: {
            "positions_per_second": [round(positions / each, 1) for each in found],
            "median": round(positions / statistics.median(found), 1),
            "bytes_per_position": round(size[name], 1),
        }
        for name, found in seconds.items()
    }
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept = {k: v for k, v in vars(settings).items() if k not in ("url", "label", "save")}
    found = known | {settings.label: {"settings": kept, "cpu": cpu_model(), "figures": figures}}
    print(json.dumps(found[settings.label], indent=1))
    if settings.save:
        write(RESULTS, found)


def _rows(settings: Settings) -> list[list[int]]:
    text = "".join(path.read_text() for path in sorted((ROOT / "kdtrain").rglob("*.py")))
    tokens = load_tokenizer(read_spec("stdlib-5m", "teachers"))(text)["input_ids"]
    length = settings.seq_len
    return [tokens[row * length : (row + 1) * length + 1] for row in range(settings.rows)]


def _sides(settings: Settings) -> dict[str, Callable[[int], dict[str, Any]]]:
    """What each side adds to a request for a row."""

    def samples(row: int) -> dict[str, Any]:
        asked = SampleRequest(number=SAMPLES, seed=0, split="train", row=row)
        return {"prompt_logprobs": 0, "vllm_xargs": asked.to_args()}

    sides: dict[str, Callable[[int], dict[str, Any]]] = {"none": lambda row: {}}
    for number in TOP:
        sides[f"top-{number}"] = lambda row, number=number: {"prompt_logprobs": number}  # type: ignore[misc]
    probe = _post(settings, [1, 2, 3], samples(0), "probe").json()["choices"][0]["prompt_logprobs"]
    if next(iter(probe[1].values()))["rank"] < 0:  # a receipt
        sides[f"samples-{SAMPLES}"] = samples
    return sides


def _post(settings: Settings, tokens: list[int], parameters: dict[str, Any], salt: str) -> requests.Response:
    body = {"model": settings.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "cache_salt": salt}
    answer = requests.post(f"{settings.url}/v1/completions", json=body | parameters, timeout=600)
    if answer.status_code != 200:
        raise SystemExit(f"{settings.url}: {answer.status_code} {answer.text[:500]}")
    return answer


def _ask(settings: Settings, tokens: list[int], parameters: dict[str, Any], salt: str) -> int:
    return len(_post(settings, tokens, parameters, salt).content)


if __name__ == "__main__":
    main(options(Settings))
