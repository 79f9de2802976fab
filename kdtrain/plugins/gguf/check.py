"""Whether llama.cpp computes from a GGUF what the student computes: a file that does not is not published.

Compared are the ids of 200 texts and the log p of all entries: by cyllama at every position of the first texts, by
xllamacpp alone after each text, of 200 at 49,152 entries and 66 at 151,936, fewer of models above 150 M parameters.
llama.cpp runs in a child process (`runner`), on the CPU, with keys and values in fp32.

A wrong rule hides under rounding: a base of the rotation that is wrong by a tenth costs SmolLM2 a KL of 1e-4, and bf16
itself 1.8e-3. So the student is written in fp32 first, where right files have a KL under 1e-9 and that one fails. Of
the fewer bits the median is bounded: a few positions amplify rounding, and one of them may decide the mean.
"""

import importlib.metadata
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtrain.errors import RunError, printable
from kdtrain.plugins.gguf import runner

KL = {"F32": 1e-7, "F16": 1e-4, "BF16": 2e-3, "Q8_0": 5e-2}
"""Largest KL(student || file) in nats: in fp32 the mean, else the median, of which SmolLM2 has a tenth."""
LOG_P, _SHARE = 1e-4, 0.99
"""Largest difference of a log p in fp32 per 10 of the largest, and the share of the positions that keep to it.

At the others a model amplifies rounding: there torch's own logits of SmolLM2 differ by 1.4e-3 in fp32 and fp64.
"""
LIBRARIES = ("cyllama", "xllamacpp")
"""Packages with llama.cpp, the better one first."""
TEXTS = 200
_BOUNDS = {"cyllama": (2e11, 5e7), "xllamacpp": (7e11, 1e7)}
"""Parameters times positions, 10 and 35 seconds of a core for each side; numbers of all answers.

Those of xllamacpp are JSON, 100 seconds of a core.
"""
_PATIENCE = 1800.0
"""Seconds until llama.cpp is ended."""
_PIECES = """The quick brown fox| don't I'LL they've| 12 345,678.90|1e-5|   |\n\n|\n|\t\tif x == 1:\r\n|naïve café
привет мир|日本語の文章|مرحبا بالعالم|हिन्दी में|한국어|ไทย|🙂👩‍👩‍👧|x²½Ⅷ٣|foo_bar(baz)[0]|https://a.b/c?d=e#f
!!!???...|\u00a0\u2003|-->|a  b   c"""


def probe_texts(tokenizer: Any) -> list[str]:
    """Make texts of digits, runs of spaces, code, other scripts and the tokens that were added to the tokenizer."""
    pieces = [*_PIECES.split("|"), *sorted(tokenizer.get_added_vocab())[:8]]
    chance = random.Random(0)
    return ["".join(chance.choices(pieces, k=4)) for _ in range(TEXTS)]


def probe_rows(library: str, ids: list[list[int]], model: Any) -> list[list[int]]:
    """Return the rows of ids whose log p are compared, as many as time and answers allow."""
    longest, ends = model.config.max_position_embeddings, accumulate(map(len, ids))
    work, numbers = _BOUNDS[library]
    most, answers = work / model.num_parameters(), numbers / model.config.vocab_size
    if library == "cyllama":  # which answers at every position
        most = min(most, answers)
    rows = [row[:longest] for row, end in zip(ids, ends, strict=True) if row and end <= max(128.0, most)]
    return rows[: 1 + int(answers)]


def write_checked(file: Path, write: Callable[[str], None], kind: str, model: Any, tokenizer: Any) -> str:
    """Write a file by `write(KIND)`, compare it with the model in fp32, and return what was checked, with figures.

    RunError: llama.cpp cannot read it, or computes something else; the message names the largest difference.
    """
    library = next(filter(importlib.util.find_spec, LIBRARIES), None)
    if library is None:
        write(kind)
        return "not checked in llama.cpp, which pip install cyllama installs"
    texts = probe_texts(tokenizer)
    ids = [tokenizer(text).input_ids for text in texts]
    rows = probe_rows(library, ids, model)
    request = {"file": str(file), "texts": texts, "rows": rows, "threads": torch.get_num_threads()}
    figures = name = f"llama.cpp ({library} {importlib.metadata.version(library)})"
    figures += f": the same ids of {TEXTS} texts"
    for each in dict.fromkeys(("F32", kind)):
        write(each)
        try:
            with tempfile.TemporaryFile() as answers:
                _run(library, request, answers)
                for text, ours, theirs in zip(texts, ids, json.loads(str(np.load(answers))), strict=True):
                    if ours != theirs:
                        raise RunError(f"splits {text!r} into {theirs}, and the student's tokenizer into {ours}")
                figures += f"; in {each} {_compare(answers, model, rows, each)}"
        except RunError as error:
            raise RunError(f"{file.name} is not published: {name} {printable(str(error))}") from None
    return figures


def _run(library: str, request: Any, answers: Any) -> None:
    """Run llama.cpp in a process of its own (`runner`), and leave a file of its answers. RunError: it fails."""
    words = [sys.executable, "-P", runner.__file__, library]
    given = json.dumps(request).encode()
    try:
        done = subprocess.run(words, input=given, stdout=answers, stderr=subprocess.PIPE, timeout=_PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"takes more than {error.timeout:.0f} seconds") from None
    if done.returncode:
        lines = ["", *done.stderr.decode(errors="replace").strip().splitlines()]
        why = sorted(lines, key=lambda line: "rror" in line)[-1]  # the last error, else the last line
        raise RunError(f"ended with code {done.returncode}: {why[:300]}")
    answers.seek(0)


@torch.no_grad()
def _compare(answers: Any, model: Any, rows: list[list[int]], kind: str) -> str:
    """Return the figures of all positions. RunError: they are beyond the bounds."""
    gaps = list[Tensor]()
    kls = list[Tensor]()
    most = LOG_P
    for row in rows:
        ours_TV = model(torch.tensor([row])).logits[0].double().log_softmax(-1)
        theirs_TV = torch.from_numpy(np.load(answers)).double().log_softmax(-1)
        ours_TV = ours_TV[-len(theirs_TV) :]
        kls.append((ours_TV.exp() * (ours_TV - theirs_TV)).sum(-1))
        gaps.append((ours_TV - theirs_TV).abs().amax(-1))
        most = max(most, LOG_P * float(ours_TV.abs().max()) / 10)
    gap_N, kl_N = torch.cat(gaps), torch.cat(kls)  # both keep a NaN
    kl, what = (kl_N.mean(), "mean") if kind == "F32" else (kl_N.median(), "median")
    figures = (
        f"log p at {len(kl_N):,} positions with a largest difference of {gap_N.max():.1e}, {what} KL {kl:.1e} nats"
    )
    if not kl <= KL[kind] or (kind == "F32" and not gap_N.quantile(_SHARE) <= most):
        raise RunError(f"computes {figures}; of a right file the KL is under {KL[kind]:g}")
    return figures
