"""What the text of a round shows, from its cache alone, and the rules by which it collapses.

Of tokens drawn from the student, -log q is an estimate of its entropy, log q - log p of the reverse KL, and
min(1, p / q) of the mass that both share: a round holds both numbers of each token. So a replay logs what the run did.

StreamShape suffixes: n rows, T positions.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from kdtrain.cache.read.reader import CacheReader, LocalCache
from kdtrain.errors import RunError, UsageError, log
from kdtrain.monitor.rules import Rule, Signs

ROWS = 256
"""Rows of which the teacher's numbers are read."""
_SHOWN = 2
"""Held-out texts of a round that are logged."""
_BIGRAM = 500_000
"""Tokens that the bigram of the text is fitted on."""
_SHORTER, _LONGER, _ENDED, _REPEATED = 0.5, 2.0, 0.5, 0.3
_FIRST = ("length", "ended", "room")
"""What later rounds are compared with."""


def figures(cache: LocalCache, text: Any) -> dict[str, float]:
    """Compute the numbers of a round, by their names in metrics.jsonl.

    text: the source of the fixed text that the student would learn from otherwise, for the loss of its bigram, or None.
    """
    train = cache["train"]
    whole = train.text(np.arange(len(train)))
    mask_nT = whole["loss_mask"] == 1
    lengths_n = mask_nT.sum(1)
    written = (cache.manifest.generated or {})["train"]
    found = {
        "length": float(lengths_n.mean()),
        "length_p95": float(np.quantile(lengths_n, 0.95)),
        "ended": written["stop"] / len(train),
        "room": float(cache.manifest.settings.data["generated"]["max_new_tokens"]),
        "repeated": repeated(whole["tokens"], mask_nT),
    }
    found |= _of_tokens(train)[0]
    if text is not None and (loss := text.bigram_loss(train, _BIGRAM)) is not None:
        found["bigram_loss"] = loss
    held, error = _of_tokens(cache["validation"])
    shown = {f"rollouts/{name}": value for name, value in found.items()}
    shown |= {f"rollouts/held_out/{name}": value for name, value in held.items()}
    return shown if error is None else shown | {"rollouts/held_out/reverse_kl_error": error}


def some(reader: CacheReader, most: int) -> list[int]:
    """Return rows of a split, evenly spread."""
    return sorted({*np.linspace(0, len(reader) - 1, min(most, len(reader))).astype(int).tolist()})


def _of_tokens(reader: CacheReader) -> tuple[dict[str, float], float | None]:
    """Average over the tokens of some rows, in nats; return the means, and the standard error of the reverse KL.

    The standard error is over rows; a single one has none.
    """
    rows = some(reader, ROWS)
    sums = torch.zeros(5, dtype=torch.float64)
    ratios = list[tuple[float, int]]()
    for start in range(0, len(rows), 32):
        batch = reader.read(rows[start : start + 32])
        targets, mask_BT = batch.targets, batch.loss_mask
        assert targets is not None and targets.policy is not None
        own_BT, theirs_BT = (each.double().view(mask_BT.shape) for each in (targets.policy, targets.label_logprob))
        beta = torch.ones((), dtype=torch.float64, requires_grad=True)
        # the slope of log Z in beta is E_p[log p]
        (slope,) = torch.autograd.grad(targets.double().log_partition(beta)[mask_BT.flatten()].sum(), beta)
        ratio_BT = (own_BT - theirs_BT).masked_fill(~mask_BT, 0.0)
        shared_BT = (theirs_BT - own_BT).clamp(max=0).exp().masked_fill(~mask_BT, 0.0)
        each = (mask_BT.sum(), -own_BT[mask_BT].sum(), -theirs_BT[mask_BT].sum(), -slope, shared_BT.sum())
        sums += torch.stack([value.double() for value in each])
        ratios += zip(ratio_BT.sum(1).tolist(), mask_BT.sum(1).tolist(), strict=True)
    count, entropy, loss, teacher, shared = sums.tolist()
    count = max(count, 1.0)
    mean = sum(total for total, _ in ratios) / count
    spread = sum((total - mean * tokens) ** 2 for total, tokens in ratios)  # of a ratio of sums over rows
    named = {"entropy": entropy / count, "teacher_loss": loss / count, "teacher_entropy": teacher / count}
    error = float(np.sqrt(spread)) / count if len(ratios) > 1 else None
    return named | {"overlap": shared / count, "reverse_kl": mean}, error


def repeated(tokens_nT1: np.ndarray, mask_nT: np.ndarray) -> float:
    """Compute the share of the 3-grams of texts that occurred earlier in the same text."""
    again = total = 0
    for row, mask in zip(tokens_nT1[:, 1:], mask_nT, strict=True):
        text = row[mask].tolist()
        grams = list(zip(text, text[1:], text[2:], strict=False))
        total = total + len(grams)
        again = again + len(grams) - len({*grams})
    return again / max(total, 1)


def beside_first(found: Mapping[str, float], first: Mapping[str, float]) -> dict[str, float]:
    """Add to the numbers of a round those of the first with which they are compared."""
    return {**found, **{f"rollouts/first/{name}": first[f"rollouts/{name}"] for name in _FIRST}}


def refuse_collapse(found: Mapping[str, float]) -> None:
    """Raise RunError if, by a rule below, the text of a round has collapsed."""
    signs = Signs(step=0, numbers=found)
    for rule, test in _COLLAPSED:
        if (text := test(signs)) is not None:
            raise RunError(f"{text}; --on-collapse stop ends the run here; {rule.knob}", reason="collapse")


Score = Callable[[str, str, int], float]
"""A number of one's own for a held-out text: prompt, answer, and the row."""


def load_score(name: str) -> Score:
    """Import the function that `--score-with` names. UsageError: there is none. Called, it may raise RunError."""
    module, _, function = name.partition(":")
    sys.path.append(os.getcwd())  # where a console script does not look
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--score-with {name}: {error}; give MODULE:FUNCTION that Python can import") from None
    if not callable(found):
        raise UsageError(f"--score-with {name}: it is not a function")

    def score(prompt: str, answer: str, row: int) -> float:
        try:
            return float(found(prompt, answer, row))
        except Exception as error:
            raise RunError(f"--score-with {name}: {type(error).__name__}: {error}; correct it, and resume") from error

    return score


def texts(tokens_nT1: np.ndarray, mask_nT: np.ndarray, tokenizer: Any) -> list[tuple[str, str]]:
    """Return the prompt and the answer of each row that has an answer."""
    places = [np.flatnonzero(mask) for mask in mask_nT]
    parts = [(row[: at[0] + 1], row[at + 1]) for row, at in zip(tokens_nT1, places, strict=True) if len(at)]
    return [(tokenizer.decode(prompt.tolist()), tokenizer.decode(answer.tolist())) for prompt, answer in parts]


def mean_score(found: list[tuple[str, str]], score: Score) -> float:
    """Return the mean score of texts; NaN of none."""
    return float(np.mean([score(*each, row) for row, each in enumerate(found)])) if found else np.nan


def show_texts(cache: LocalCache, tokenizer: Any, name: str, score: Score | None) -> dict[str, float]:
    """Log the first held-out prompts of a round with what the student wrote; return the mean score of all, if any."""
    reader = cache["validation"]
    whole = reader.text(np.arange(len(reader) if score is not None else min(_SHOWN, len(reader))))
    found = texts(whole["tokens"], whole["loss_mask"] == 1, tokenizer)
    for prompt, answer in found[:_SHOWN]:
        log.info("%s, held out: %s -> %s", name, repr(prompt[-60:]), repr(answer[:200]))
    return {} if score is None else {"rollouts/held_out/score": mean_score(found, score)}


def _pair(signs: Signs, name: str) -> tuple[float, float] | None:
    now, first = signs.numbers.get(f"rollouts/{name}"), signs.numbers.get(f"rollouts/first/{name}")
    return None if now is None or first is None else (now, first)


_LENGTH_RULE = Rule(
    "lower --lr, mix with fixed text (--rollout-share 0.5), or give --max-new-tokens more room", each_step=True
)


@_LENGTH_RULE
def rollouts_length(signs: Signs) -> str | None:
    """Warn of texts that became much shorter or longer."""
    if (pair := _pair(signs, "length")) is None:
        return None
    now, first = _pair(signs, "room") or (1.0, 1.0)  # longer, as --max-new-tokens grows
    if _SHORTER * pair[1] <= pair[0] <= _LONGER * pair[1] * now / first:
        return None
    return f"the student's texts have {pair[0]:.1f} tokens, and had {pair[1]:.1f} in the first round"


_ENDED_RULE = Rule("mix with fixed text that ends (--rollout-share 0.5), or raise --max-new-tokens", each_step=True)


@_ENDED_RULE
def rollouts_ended(signs: Signs) -> str | None:
    """Warn of texts that no longer end."""
    if (pair := _pair(signs, "ended")) is None or pair[0] >= _ENDED * pair[1]:
        return None
    return f"{pair[0]:.1%} of the student's texts end, and {pair[1]:.1%} did in the first round"


_REPEATED_RULE = Rule(
    "lower --lr, mix with fixed text (--rollout-share 0.5), or begin with --cold-start", each_step=True
)


@_REPEATED_RULE
def rollouts_repeat(signs: Signs) -> str | None:
    """Warn of texts that repeat themselves."""
    share = signs.numbers.get("rollouts/repeated", 0.0)
    return None if share <= _REPEATED else f"{share:.1%} of the 3-grams of the student's texts are repetitions"


_STRANGE_RULE = Rule("begin with --cold-start, or with prompts that the teacher knows", each_step=True)


@_STRANGE_RULE
def rollouts_strange(signs: Signs) -> str | None:
    """Warn of texts that the teacher predicts worse than a bigram of the fixed text."""
    loss, bigram = (signs.numbers.get(f"rollouts/{name}") for name in ("teacher_loss", "bigram_loss"))
    if loss is None or bigram is None or loss <= bigram:
        return None
    return f"the teacher's loss on the student's texts is {loss:.3f}, above the {bigram:.3f} of a bigram of the text"


_COLLAPSED = (
    (_LENGTH_RULE, rollouts_length),
    (_ENDED_RULE, rollouts_ended),
    (_REPEATED_RULE, rollouts_repeat),
    (_STRANGE_RULE, rollouts_strange),
)
