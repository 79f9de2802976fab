"""A fourth corpus, of which the shipped teacher knows less than a bigram: C++ headers of PyTorch, in passages of lines.

They are those of the torch of `constraints.txt`, without the generated ones. `python -m benchmarks.science.headers`
writes `runs/headers.jsonl`, in an order of its own, as neighbours are much alike.
"""

import importlib.util
import random
from pathlib import Path

from benchmarks.harness.corpus import write_corpus

LONG = 3000
"""Characters from which a passage ends with its line."""
LEAST, MOST = 2000, 40_000
"""Characters of a file: shorter ones are mostly a license, longer ones mostly generated."""


def passages() -> list[str]:
    """Return the passages of all headers, shuffled."""
    spec, found = importlib.util.find_spec("torch"), list[str]()
    assert spec is not None and spec.origin is not None
    for path in sorted((Path(spec.origin).parent / "include").rglob("*.h")):
        text = path.read_text(errors="replace")
        if "ops" in path.parts or not LEAST <= len(text) <= MOST:
            continue
        found.append("")
        for line in text.splitlines(keepends=True):
            found[-1] += line
            if len(found[-1]) >= LONG:
                found.append("")
    found = [each for each in found if each]
    random.Random(0).shuffle(found)
    return found


if __name__ == "__main__":
    write_corpus("headers", passages())
