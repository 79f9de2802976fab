"""How large the house is: `python tests/house/counts.py` prints each count beside its bound in bounds.toml.

Lines are those of the files; lines of code hold neither a comment nor a docstring. What is behind a module are the
files that its imports reach, those inside of functions included.
"""

import ast
import io
import tokenize
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = tomllib.loads((Path(__file__).parent / "bounds.toml").read_text())
STARTS = {"trainer": "training.trainer", "reader": "cache.read.reader", "distill": "commands.distill"}
SPEECH = ("said", "says", "told", "asked")
"""Verbs of speech, where the field logs, returns and requests."""
_NO_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def lines_of(path: Path) -> int:
    """The lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def code_of(path: Path) -> int:
    """The lines of a file that hold code."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in _NO_CODE:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTION))
            and ast.get_docstring(node, clean=False) is not None
        ):
            held.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(held)


def modules() -> dict[str, Path]:
    """Every module of kdtrain by its dotted name."""
    found = {}
    for path in sorted((ROOT / "kdtrain").rglob("*.py")):
        found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imports_of(path: Path, known: dict[str, Path]) -> set[str]:
    """The modules of kdtrain that a file imports, but for the face."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("kdtrain"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & known.keys() - {"kdtrain"}


def behind(start: str, known: dict[str, Path]) -> set[str]:
    """The modules that importing `start` would read, itself included."""
    seen: set[str] = set()
    open_ = [start]
    while open_:
        if (name := open_.pop()) not in seen:
            seen.add(name)
            open_ += imports_of(known[name], known)
    return seen


def used_once(path: Path) -> tuple[int, int]:
    """The functions of a file, and its private ones that it mentions once outside of their `def`."""
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, _FUNCTION)]
    mentioned = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Name | ast.Attribute)
    )
    private = [each.name for each in functions if each.name.startswith("_") and not each.name.endswith("__")]
    return len(functions), sum(mentioned[name] == 1 for name in private)


def attributes_of(node: ast.ClassDef) -> int:
    """The attributes that the class declares, or sets on itself."""
    declared = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            declared.add(each.attr)
    return len(declared)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The parameters of a function without `self`."""
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def counts() -> dict[str, int]:
    """Every count that bounds.toml bounds."""
    known = modules()
    core = {name: path for name, path in known.items() if not name.startswith("kdtrain.plugins")}
    found = {"core lines": sum(map(lines_of, core.values())), "core lines of code": sum(map(code_of, core.values()))}
    found["plugin lines"] = sum(lines_of(path) for name, path in known.items() if name not in core)
    for label, start in (
        ("trainer", "training.trainer"),
        ("reader", "cache.read.reader"),
        ("distill", "commands.distill"),
    ):
        reached = behind(f"kdtrain.{start}", known)
        found[f"files behind {label}"] = len(reached)
        found[f"lines behind {label}"] = sum(lines_of(known[name]) for name in reached)
    found["modules in a room"] = max(Counter(path.parent for path in known.values()).values())
    functions, once = (sum(each) for each in zip(*map(used_once, core.values()), strict=True))
    found["private helpers used once, per mille"] = round(1000 * once / functions)
    found["verbs of speech"] = sum(
        word.strip("`'\".,;:()[]{}").lower() in SPEECH for path in known.values() for word in path.read_text().split()
    )
    found["test lines"] = sum(map(lines_of, (ROOT / "tests").rglob("*.py")))
    found["benchmark lines"] = sum(map(lines_of, (ROOT / "benchmarks").rglob("*.py")))
    return found


def large(kind: str) -> dict[str, int]:
    """Classes with more `attributes`, or functions with more `parameters`, than their bound: what, and how many."""
    most, found = BOUNDS["each"][kind], {}
    for name, path in modules().items():
        for node in ast.walk(tree_of(path)):
            if kind == "attributes" and isinstance(node, ast.ClassDef) and not node.name.endswith("Config"):
                number = attributes_of(node)
            elif kind == "parameters" and isinstance(node, _FUNCTION):
                number = parameters_of(node)
            else:
                continue
            if number > most:
                found[f"{name}.{node.name}"] = number
    return found


def shared_names() -> dict[str, list[str]]:
    """Names of classes that several modules define, each with its modules."""
    found: dict[str, list[str]] = {}
    for name, path in modules().items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    return {name: where for name, where in found.items() if len(where) > 1}


if __name__ == "__main__":
    for name, number in counts().items():
        bound = BOUNDS["house"][name]
        goal = BOUNDS["goal"].get(name, bound)
        print(f"{name:40}{number:9,}{bound:9,}{goal:9,}{'  over' if number > bound else ''}")
    for kind in ("attributes", "parameters"):
        print(kind, large(kind))
    print("names of two classes", shared_names())
