"""A fourth corpus, of which the shipped teacher knows less than a bigram: C++ headers of PyTorch, in passages of lines.

They are those of the torch of `constraints.txt`, without the generated ones. `python -m benchmarks.science.headers`
writes `runs/headers.jsonl`, in an order of its own, as neighbours are much alike.
"""

import argparse
import importlib.util
import json
import random
from pathlib import Path

from kdtrain.files import publish_text

LONG = 3000
"""Characters from which a passage ends with its line."""
LEAST, MOST = 2000, 40_000
"""Characters of a file: shorter ones are mostly a license, longer ones mostly generated."""


def write(path: Path) -> Path:
    """Write the corpus to `path` as jsonl, unless it exists; return the path."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_text(path, "".join(json.dumps({"text": text}) + "\n" for text in passages()), "headers")
    return path


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", nargs="?", type=Path, default=Path("runs/headers.jsonl"))
    print(write(parser.parse_args().path))
