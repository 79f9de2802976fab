"""A second corpus, on which nothing was tuned: the docstrings of installed libraries, a document a module.

The libraries are those of `constraints.txt`, so that the text is the same wherever they are installed. It is English
with formulas and examples, where the standard library is mostly code. `python -m benchmarks.science.docstrings` writes
`runs/docstrings.jsonl`, from which sweeps read it.
"""

import ast
import importlib.util
from pathlib import Path

from benchmarks.harness.corpus import write_corpus

LIBRARIES = ("torch", "transformers", "numpy", "datasets", "matplotlib", "h5py", "rich", "hypothesis")
LEAST = 400
"""Characters below which a module is left out."""
NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts() -> list[str]:
    """Collect the docstrings of each module, in the order of its path, without duplicates."""
    found, seen = [], set()
    for library in LIBRARIES:
        spec = importlib.util.find_spec(library)
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                own = [text for text in docstrings(path) if text not in seen]
                seen.update(own)
                if len(joined := "\n\n".join(own)) >= LEAST:
                    found.append(joined)
    return found


def docstrings(path: Path) -> list[str]:
    """Return the docstrings of a module, its own first; none of one that does not parse."""
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except SyntaxError:
        return []
    return [text for node in ast.walk(tree) if isinstance(node, NODES) and (text := ast.get_docstring(node))]


if __name__ == "__main__":
    write_corpus("docstrings", texts())
