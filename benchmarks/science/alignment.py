"""How often the alignment detector finds a cache that is off by one, and how often it accuses an aligned one.

`python -m benchmarks.science.alignment` writes benchmarks/results/alignment.json. Teacher: the shipped one, over
validation text of the standard library. Each case is a codec, a shift of its entries against the text, and a number of
rows of 128 positions, drawn 100 times without replacement from 600; it counts the verdicts. `untrained` has the entries
of a student with random weights, which say nothing about the text, at the shift 0: any verdict but 0 or none is false.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import RESULTS, STUDENT, TEACHER, write
from benchmarks.harness.machine import commit, machine
from benchmarks.harness.models import packed, teacher_logits, token_tensor
from kdtrain.cache.format.codec import decode, encode_sequences
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.tools.self_check import LEAST_MASS, LEVEL, MARGIN, SHIFTS, detect
from kdtrain.models.loading import load_student
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.batch import Batch

RESULT = RESULTS / "alignment.json"
LENGTH, MICRO = 128, 8
CODECS = {
    "top-k 12": (12, 0),
    "top-k 1": (1, 0),
    "samples 50": (0, 50),
    "samples 8": (0, 8),
    "top-k 8, samples 24": (8, 24),
}


def main() -> int:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pool", type=int, default=600, help="rows that are drawn from")
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    tokens = token_tensor(packed(TEACHER, "validation", options.pool, LENGTH + 2))
    untrained = load_student(ModelSpec.read(STUDENT), vocab_size=2048, seed=0, device="cpu").eval()
    teachers = {"": teacher_logits(TEACHER), "untrained, ": lambda tokens_BT, _: untrained(tokens_BT).logits.float()}
    cases: list[dict[str, Any]] = []
    for who, logits in teachers.items():
        pools = encoded(tokens, logits)
        for name, (kept, spec) in pools.items():
            for shift in SHIFTS if not who else (0,):
                for rows in (10, 20, 50):
                    cases.append(
                        {"case": who + name, "shift": shift, "rows": rows}
                        | verdicts(kept, spec, tokens, shift, rows, options.draws)
                    )
                    print(cases[-1], flush=True)
    settings = {"pool": len(tokens), "positions": LENGTH, "draws": options.draws, "level": LEVEL, "margin": MARGIN}
    settings |= {"least_mass": LEAST_MASS, "teacher": "stdlib-5m", "untrained": "stdlib-1m"}
    write(options.result, {"commit": commit(), **settings, "machine": machine(torch.device("cpu")), "cases": cases})
    wrong = [case for case in cases if case["rows"] == 50 and not case["case"].startswith("untrained")]
    return int(any(case["verdicts"].get(str(case["shift"]), 0) != options.draws for case in wrong))


def encoded(tokens: torch.Tensor, logits: Any) -> dict[str, tuple[dict[str, np.ndarray], CodecSpec]]:
    """Encode the pool by each codec, arrays [n, LENGTH + 2, ...]."""
    parts: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in CODECS}
    specs = {
        name: CodecSpec(kind="sparse", vocab_size=2048, top_k=top_k, num_samples=samples)
        for name, (top_k, samples) in CODECS.items()
    }
    with torch.no_grad():
        for first in range(0, len(tokens), MICRO):
            part = tokens[first : first + MICRO]
            logits_BTV = logits(part[:, :-1], None)
            for name, spec in specs.items():
                found = encode_sequences(logits_BTV, part[:, 1:], spec, seed=0, split="validation", first=first)
                parts[name].append(found)
    return {
        name: ({key: np.concatenate([part[key] for part in found]) for key in found[0]}, specs[name])
        for name, found in parts.items()
    }


def verdicts(
    kept: dict[str, np.ndarray], spec: CodecSpec, tokens: torch.Tensor, shift: int, rows: int, draws: int
) -> dict[str, Any]:
    """Count how often each verdict is returned, and return the figures of the last draw."""
    own = {name: values[:, 1 + shift : 1 + shift + LENGTH] for name, values in kept.items() if name != "broken"}
    text, found = tokens[:, 1 : LENGTH + 2], Counter[str]()
    ones, zeros = torch.ones(rows, LENGTH, dtype=torch.bool), torch.zeros(rows, LENGTH, dtype=torch.int64)
    for draw in range(draws):
        chosen = np.random.RandomState(draw).permutation(len(tokens))[:rows]
        targets = decode({name: np.ascontiguousarray(values[chosen]) for name, values in own.items()}, spec)
        last = detect([Batch(text[chosen], ones, zeros, targets)])
        found[str(last.shift)] += 1
    return {"verdicts": dict(found), "last": last.to_json()}


if __name__ == "__main__":
    sys.exit(main())
