"""One cache, students with other tokenizers: cross-entropy, chunks, cells, both, and ULD, in bits per byte.

    python -m benchmarks.science.tokenizers                 the study: hours on two cores; the same command resumes it
    python -m benchmarks.science.tokenizers --tokens 650000 --out runs/tokenizers-short          a quarter of it
    python -m benchmarks.science.tokenizers --quick --out runs/tokenizers-quick                  to see that it works

The shipped teacher (BPE, 2,048 entries) is cached once, with 50 samples a token. Students of one body, and of the rows
of embedding that their tokenizers need, learn from this cache by the real command: with the teacher's tokenizer, which
is the ceiling, with BPE of 1,024, 4,096 and 8,192 entries (the last with single digits), and with bytes, all trained
here on the text of the cache's kind. Each reads as many tokens of its own, in one order a seed, so that a student of
bytes reads less text. Cross-entropy alone reads the same rows. What a term gains is in bits per byte against
cross-entropy of the same tokenizer and seed, and its share is that of what the teacher gains with its own tokenizer.

ULD (Boizard et al. 2024, arXiv 2402.12030) is a loop of its own (`uld`).

What it gives up: one teacher, one text, one learning rate for all, students of 1 to 2 M parameters.
"""

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.harness import RESULTS, ROOT, STUDENT, TEACHER, write, write_spec
from benchmarks.harness.command import Kdtrain, claim, environment, options
from benchmarks.harness.study import Study
from benchmarks.science import uld
from kdtrain.config.values import Options, option

SEQ_LEN, BATCH = 256, 16
SAME = "the teacher's"
SIZES = {"BPE 1,024": (1024, False), "BPE 4,096": (4096, False), "BPE 8,192, single digits": (8192, True)}
"""Entries of a tokenizer, and whether each digit is a token."""
BYTES = "bytes"
ALONE, ULD = "cross-entropy", "ULD"
TERMS = ("chunks", "cells", "both")
HEADLINE = (ALONE, "distilled", "cells")
"""What the goal is about."""
TEXT = 2_000_000
"""Characters that tokenizers are trained on."""


@dataclass(frozen=True, kw_only=True)
class TokenizerStudy(Options):
    """Compare what students with other tokenizers learn from one cache."""

    out: Path = Path("runs/tokenizers")
    """The folder of the cache, tokenizers and runs."""
    result: Path = RESULTS / "tokenizers.json"
    """The record to write."""
    seeds: int = option(3, least=1)
    """Runs of each kind."""
    tokens: int = option(2_600_000, least=BATCH * SEQ_LEN)
    """Tokens of a student's own that a run reads."""
    lr: float = option(2e-3, above=0)
    """Peak learning rate of all runs."""
    alphas: tuple[float, ...] = option((0.9,), several=True)
    """Weights of the teacher: of several, all are tried with the first seed, and the best is taken for the others."""
    at_once: int = option(1, least=1)
    """Runs beside each other; give each a core (OMP_NUM_THREADS)."""
    quick: bool = False
    """Little text, few steps, one seed: to see that it works."""
    minutes: float = option(1e9, above=0)
    """After this time no further run begins; the same command goes on."""


@dataclass(frozen=True)
class Settings:
    """What the runs of a folder have in common."""

    steps: int
    sequences: int
    lr: float


Entry = tuple[str, str, float, int]
"""Tokenizer, method, alpha and seed of a run."""


def main(given: TokenizerStudy) -> None:
    """Run the study, and write its record."""
    steps = 6 if given.quick else given.tokens // (BATCH * SEQ_LEN)
    # BPE of 8,192 entries needs a fifth more of the teacher's tokens for as many of its own
    settings = Settings(steps, 60 if given.quick else steps * BATCH * 5 // 4, given.lr)
    claim(given.out, settings)
    length = ("--seq-len", f"{SEQ_LEN}", "--validation-sequences", "8" if given.quick else "256")
    words = ("--teacher", TEACHER, "--data", "stdlib", "--num-sequences", f"{settings.sequences}", *length)
    common = ("--batch-size", f"{BATCH}", "--precision", "bf16", "--log-to", "none")
    common += ("--steps", f"{steps}", "--warmup-steps", f"{min(100, steps // 2)}", "--lr", f"{given.lr}")
    common += ("--eval-freq", f"{max(1, steps // 4)}", "--checkpoint-freq", f"{steps}", "--keep-rolling", "1")
    with Kdtrain() as kdtrain:
        study = Study(given.out, kdtrain, {"cache": words}, common)
        study.cache()
        specs = _students(given.out, TEXT // 20 if given.quick else TEXT)
        if given.quick:
            specs = {name: specs[name] for name in (SAME, "BPE 1,024")}

        def run(name: str, entry: Entry) -> dict[str, Any]:
            return _train(study, specs, settings, name, entry)

        kinds = {each: _tried(each[1], given.alphas) for each in _kinds(specs)}
        first = [(*each, alpha, 0) for each, alphas in kinds.items() for alpha in alphas if len(alphas) > 1]
        grid = {_name(each): each for each in first}
        records = study.records(grid, run, given.at_once, given.minutes)
        best = {each: alphas[0] if len(alphas) == 1 else _best(records, *each) for each, alphas in kinds.items()}
        seeds = range(1 if given.quick else given.seeds)
        again = [(*each, alpha, seed) for seed in seeds for each, alpha in best.items() if alpha is not None]
        again.sort(key=lambda entry: entry[1] not in HEADLINE)  # where time runs out, these have all their seeds
        grid |= {_name(each): each for each in again}
        records = study.records(grid, run, given.at_once, given.minutes)
    if records:
        write(given.result, _record(given, settings, specs, best, records, len(grid) - len(records)))


def _kinds(specs: Iterable[str]) -> list[tuple[str, str]]:
    """Every tokenizer with its methods."""
    return [
        (name, method) for name in specs for method in ((ALONE, "distilled") if name == SAME else (ALONE, *TERMS, ULD))
    ]


def _tried(method: str, alphas: tuple[float, ...]) -> tuple[float, ...]:
    return (0.0,) if method in (ALONE, ULD) else alphas


def _name(entry: Entry) -> str:
    kind, method, alpha, seed = entry
    plain = "".join(each if each.isalnum() else "-" for each in kind.replace(",", ""))
    return f"{plain}-{method}-a{alpha:g}-{seed}"


def _train(study: Study, specs: dict[str, Path], settings: Settings, name: str, entry: Entry) -> dict[str, Any]:
    """Train one student; its record."""
    kind, method, alpha, seed = entry
    record = {"tokenizer": kind, "method": method, "alpha": alpha, "seed": seed}
    if method == ULD:
        view = study.out / _name((kind, ALONE, 0.0, seed)) / "data"  # the same rows
        folder = uld.train(study.out / name, specs[kind], view, study.cache(), settings.steps, settings.lr, BATCH, seed)
        return record | {"bits_per_byte": _bits(study, folder)}
    terms = () if kind == SAME else ("--cross-tokenizer", "chunks" if method == ALONE else method)
    words = ("--student", f"{specs[kind]}", "--alpha", f"{alpha}", "--seed", f"{seed}", *terms)
    answer, _ = study.train(name, *words, may_fail=True)
    record |= {
        "bits_per_byte": _bits(study, study.out / name, answer),
        "parameters": json.loads((study.out / name / "environment.json").read_text())["student"]["parameters"],
        "teacher_bits_per_byte": answer.get("teacher_bits_per_byte"),
        "tokens_per_second": answer.get("tokens_per_second"),
        "alignment": answer.get("alignment"),
    }
    return record


def _bits(study: Study, folder: Path, answer: dict[str, Any] | None = None) -> float | None:
    """Bits per byte of a student on the validation text of the cache; None of a run that failed."""
    if answer is None:
        validation = ("--split", "validation", "--cross-tokenizer", "chunks")
        answer = study.kdtrain("evaluate", "--student", f"{folder}", "--cache", f"{study.cache()}", *validation)
        return answer["bits_per_byte"]
    return answer.get("best_bits_per_byte")


def _best(records: list[dict[str, Any]], kind: str, method: str) -> float | None:
    """The alpha with the fewest bits by the first seed."""
    own = [each for each in records if (each["tokenizer"], each["method"], each["seed"]) == (kind, method, 0)]
    own = [each for each in own if each["bits_per_byte"] is not None]
    return float(min(own, key=lambda each: each["bits_per_byte"])["alpha"]) if own else None


def _record(
    given: TokenizerStudy,
    settings: Settings,
    specs: dict[str, Path],
    best: dict[tuple[str, str], float | None],
    records: list[dict[str, Any]],
    left: int,
) -> dict[str, Any]:
    """What the page is made of."""
    known = {(each["tokenizer"], each["method"], each["alpha"], each["seed"]): each for each in records}
    ceiling = _gains(known, best, SAME, "distilled")
    rows: dict[str, Any] = {}
    for kind, method in _kinds(specs):
        own = [each for key, each in known.items() if key[:3] == (kind, method, best[kind, method])]
        bits = [each["bits_per_byte"] for each in own if each["bits_per_byte"] is not None]
        gains = _gains(known, best, kind, method)
        rows.setdefault(kind, {})[method] = {
            "alpha": best[kind, method],
            "bits_per_byte": mean(bits) if bits else None,
            "deviation": stdev(bits) if len(bits) > 1 else None,
            "seeds": len(bits),
            "gain": mean(gains) if gains else None,
            "share": mean(gains) / mean(ceiling) if gains and ceiling and mean(ceiling) > 0 else None,
        }
    first = given.out / _name((SAME, ALONE, 0.0, 0))
    aligned = {each["tokenizer"]: each["alignment"] for each in records if each.get("alignment")}
    return {
        "environment": environment(first),
        "settings": {**vars(settings), "batch": BATCH, "seq_len": SEQ_LEN, "quick": given.quick},
        "left": left,
        "teacher": {"bits_per_byte": records[0].get("teacher_bits_per_byte")},
        "alignment": aligned,
        "kinds": rows,
        "runs": records,
    }


def _gains(
    known: dict[Entry, dict[str, Any]], best: dict[tuple[str, str], float | None], kind: str, method: str
) -> list[float]:
    """Bits per byte saved against cross-entropy alone, by seed."""
    found, alpha = [], best.get((kind, method))
    for seed in range(len(known)):
        both = (known.get((kind, ALONE, 0.0, seed)), known.get((kind, method, -1.0 if alpha is None else alpha, seed)))
        if all(each is not None and each["bits_per_byte"] is not None for each in both):
            found.append(both[0]["bits_per_byte"] - both[1]["bits_per_byte"])  # type: ignore[index]
    return found


def _students(out: Path, characters: int) -> dict[str, Path]:
    """Specs of students by their tokenizers, which are trained where they are missing."""
    shipped = tomllib.loads((ROOT / STUDENT).read_text())
    found = {SAME: ROOT / "teachers" / "stdlib-5m", BYTES: out / "tokenizer-bytes"}
    found |= {name: out / f"tokenizer-{size}" for name, (size, _) in SIZES.items()}
    for name, folder in found.items():
        if not (folder / "tokenizer_config.json").exists():
            _make(*SIZES.get(name, (257, False)), characters).save_pretrained(folder)
        write_spec(out / f"{folder.name}.toml", folder.resolve(), shipped["config"])
    return {name: out / f"{folder.name}.toml" for name, folder in found.items()}


def _make(size: int, digits: bool, characters: int) -> Any:
    """A byte-level BPE of `size` entries, the last of which ends documents; 257: bytes alone."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from kdtrain.data.corpus import documents

    end, cut = "<|endoftext|>", [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence([*([pre_tokenizers.Digits(True)] if digits else []), *cut])
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    texts, left = [], characters
    for document in documents("stdlib", "train"):
        texts.append((document.text or "")[:left])
        left -= len(texts[-1])
        if left <= 0:
            break
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, clean_up_tokenization_spaces=False)


if __name__ == "__main__":
    main(options(TokenizerStudy))
