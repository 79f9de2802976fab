"""A corpus that a script writes: `python -m benchmarks.science.NAME [PATH]` makes `runs/NAME.jsonl` or PATH."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from kdtrain.files import publish_text


def write_corpus(name: str, texts: Iterable[str]) -> None:
    """Write texts as jsonl, unless the file exists, and print its path."""
    path = Path(*sys.argv[1:2] or [f"runs/{name}.jsonl"])
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts), name)
    print(path)
