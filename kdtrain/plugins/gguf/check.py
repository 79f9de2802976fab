"""Whether llama.cpp computes from a GGUF what the student computes: a file that does not is not published.

By cyllama the ids of 200 texts and the logits of all positions are compared, by xllamacpp alone the ids and the log p
of the likeliest next tokens. llama.cpp runs in a child process (`runner`), on the CPU, with keys and values in fp32.

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
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kdtrain.errors import RunError, printable
from kdtrain.monitor.progress import log
from kdtrain.plugins.gguf import runner

Read = Callable[..., bytes]
"""The next line of the answers, or as many bytes as are asked for."""
LOGITS, _SHARE = 1e-4, 0.99
"""Largest difference of a logit in fp32 per 10 of the largest logit, and the share of the positions that keep to it.

At the others a model amplifies rounding: there torch's own logits of SmolLM2 differ by 1.4e-3 in fp32 and fp64.
"""
KL = {"F16": 1e-4, "BF16": 2e-3, "Q8_0": 5e-2}
"""Largest median of KL(student || file), in nats: ten times what SmolLM2 has."""
KL_F32 = 1e-7
"""Largest mean of it in fp32."""
LOG_P = {"F32": 1e-3, "F16": 0.02, "BF16": 0.1, "Q8_0": 0.5}
"""Largest difference of the log p of a likely next token, of `_SHARE` in fp32, else the median."""
TEXTS = 200
_WORK = 2e11
"""Parameters times positions that are computed: about ten seconds of a core for each side."""
_PATIENCE = 600.0
"""Seconds without an answer until llama.cpp is ended."""
_PIECES = (
    *(
        "The quick brown fox",
        " don't I'LL they've",
        " 12 345,678.90",
        "1e-5",
        "   ",
        "\n\n",
        "\n",
        "\t\tif x == 1:\r\n",
    ),
    *(
        "naïve café",
        "привет мир",
        "日本語の文章",
        "مرحبا بالعالم",
        "हिन्दी में",
        "한국어",
        "ไทย",
        "🙂👩‍👩‍👧",
        "x²½Ⅷ٣",
        "foo_bar(baz)[0]",
    ),
    *(
        "https://a.b/c?d=e#f",
        "!!!???...",
        "\u00a0\u2003",
        "HelloWorld",
        "    return {'a': 0x1F}",
        "a  b   c    d",
        "-->",
    ),
)


def probe_texts(tokenizer: Any) -> list[str]:
    """Texts of digits, runs of spaces, code, other scripts and the tokens that were added to the tokenizer."""
    pieces, chance = [*_PIECES, *sorted(tokenizer.get_added_vocab())[:8]], random.Random(0)
    return ["".join(chance.choices(pieces, k=4)) for _ in range(TEXTS)]


def write_checked(file: Path, write: Callable[[str], None], kind: str, model: Any, tokenizer: Any) -> str:
    """Write a file by `write(KIND)`, compare it with the model in fp32, and return what was checked, with figures.

    RunError: llama.cpp cannot read it, or computes something else; the message names the largest difference.
    """
    library = next(filter(_loads, ("cyllama", "xllamacpp")), None)
    if library is None:
        write(kind)
        return "not checked in llama.cpp, which pip install --no-deps cyllama brings"
    texts = probe_texts(tokenizer)
    ids = [tokenizer(text).input_ids for text in texts]
    most = max(512.0, _WORK / sum(each.numel() for each in model.parameters()))
    rows, positions = list[list[int]](), 0
    for row in filter(None, ids):
        row = row[: model.config.max_position_embeddings]
        if (positions := positions + len(row)) <= most:
            rows.append(row)
    request = {"file": str(file), "texts": texts, "rows": rows, "threads": torch.get_num_threads()}
    name, figures = _named(library), f"the same ids of {TEXTS} texts"
    compare = {"cyllama": _compare_logits, "xllamacpp": _compare_next}[library]
    for each in dict.fromkeys(("F32", kind)):
        write(each)
        try:
            with _running(library, request) as read:
                read()
                for text, ours, theirs in zip(texts, ids, json.loads(read()), strict=True):
                    if ours != theirs:
                        raise RunError(f"splits {text!r} into {theirs}, and the student's tokenizer into {ours}")
                figures += f"; in {each} {compare(read, model, rows, each)}"
        except RunError as error:
            raise RunError(f"{file.name} is not published: {name} {printable(str(error))}") from None
    return f"{name}: {figures}"


def _named(library: str) -> str:
    return f"llama.cpp ({library} {importlib.metadata.version(library)})"


def _loads(library: str) -> bool:
    """Whether a library is installed, and can be imported on this machine."""
    if importlib.util.find_spec(library) is None:
        return False
    try:
        with _running(library, {}) as read:
            return bool(read())
    except RunError as error:
        log.warning("%s is left out: it %s", _named(library), printable(str(error)))
        return False


@contextmanager
def _running(library: str, request: Any) -> Iterator[Read]:
    """llama.cpp in a process of its own (`runner`), which is ended when it is silent for long; RunError by reading."""
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as printed:
        asked.write(json.dumps(request).encode())
        asked.seek(0)
        words = [sys.executable, "-P", runner.__file__, library]
        with subprocess.Popen(words, stdin=asked, stdout=subprocess.PIPE, stderr=printed) as child:

            def read(size: int | None = None) -> bytes:
                out: Any = child.stdout
                timer = threading.Timer(_PATIENCE, child.kill)
                timer.start()
                try:
                    found: bytes = out.readline() if size is None else out.read(size)
                finally:
                    timer.cancel()
                if len(found) == size or (size is None and found.endswith(b"\n")):
                    return found
                code = child.wait()
                printed.seek(0)
                last = printed.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise RunError(f"ended with code {code}: {last[:300]}")

            try:
                yield read
            finally:
                child.kill()


@torch.no_grad()
def _compare_logits(read: Read, model: Any, rows: list[list[int]], kind: str) -> str:
    """The figures of all positions. RunError: they are beyond the bounds."""
    gaps, kls, largest = list[Tensor](), list[Tensor](), 1.0
    for row in rows:
        ours_TV = model(torch.tensor([row])).logits[0].float()
        theirs_TV = torch.frombuffer(bytearray(read(4 * ours_TV.numel())), dtype=torch.float32).view_as(ours_TV)
        logp_TV = ours_TV.double().log_softmax(-1)
        kls.append((logp_TV.exp() * (logp_TV - theirs_TV.double().log_softmax(-1))).sum(-1))
        gaps.append((ours_TV - theirs_TV).abs().amax(-1))
        largest = max(largest, float(ours_TV.abs().max()) / 10)
    gap_N, kl_N = torch.cat(gaps), torch.cat(kls)  # both keep a NaN
    mean, median, most = float(kl_N.mean()), float(kl_N.median()), LOGITS * largest
    figures = f"logits of {len(kl_N):,} positions with a largest difference of {gap_N.max():.1e}, KL {mean:.1e} nats"
    right = f"KL {KL_F32:g} and logits within {most:.0e} at 99 of 100 positions"
    if kind != "F32":
        figures, right = f"{figures}, its median {median:.1e}", f"a median under {KL[kind]:g}"
        good = median <= KL[kind]
    else:
        good = mean <= KL_F32 and bool(gap_N.quantile(_SHARE) <= most)
    if not good:
        raise RunError(f"computes {figures}; a right one has {right}")
    return figures


@torch.no_grad()
def _compare_next(read: Read, model: Any, rows: list[list[int]], kind: str) -> str:
    """The figures of the next token after each row. RunError: they are beyond the bounds."""
    gaps = list[Tensor]()
    for row in rows:
        logp_V = model(torch.tensor([row])).logits[0, -1].float().log_softmax(-1)
        gaps += [(logp_V[token] - logp).abs() for token, logp in json.loads(read())]
    gap_N = torch.stack(gaps)
    figures = f"log p of likely next tokens after {len(rows)} prompts with a largest difference of {gap_N.max():.1e}"
    if not gap_N.quantile(_SHARE if kind == "F32" else 0.5) <= LOG_P[kind]:
        raise RunError(f"computes {figures}; a right one is within {LOG_P[kind]:g}")
    return figures
