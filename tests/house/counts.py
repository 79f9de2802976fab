"""How large the house is: `python tests/house/counts.py` prints each count beside its bound in bounds.toml.

Lines are those of the files; lines and characters of code are without comments, docstrings and blanks, so that neither
a shorter nor a longer line changes the characters. What an import or a run loads is read from `sys.modules`, so that
neither a package's `__init__` nor a module named in a string is missed. What plugins use is followed through whatever
hands a name on, to where it is defined. An import or a run that fails ends the counts with its error.
"""

import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BOUNDS = tomllib.loads((Path(__file__).parent / "bounds.toml").read_text())
STARTS = {"library": "kdtrain", "reader": "kdtrain.cache.read.reader", "trainer": "kdtrain.training.trainer"}
"""Modules whose import is counted."""
_SHORT = ("--seq-len", "64", "--num-sequences", "8", "--validation-sequences", "2", "--num-workers", "0")
_FP32 = ("--precision", "fp32")
_CAPTURE = ["cache-teacher", "--teacher", "stdlib-5m", "--data", "stdlib", "--out", "cache", *_SHORT, *_FP32]
_STEPS = 2
_CACHED = ["distill", "--cache", "cache", "--student", "stdlib-1m", "--out", "run", "--batch-size", "2", "--no-compile"]
_LOADED = """
import importlib, json, os, runpy, sys
import torch, transformers
for place, argv in enumerate(json.loads(sys.argv[1])):
    if not (child := os.fork()):
        torch.set_num_threads(1)
        sys.argv = argv
        try:
            if argv[1:]:
                runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
            else:
                importlib.import_module(argv[0])
        except SystemExit as ended:
            assert not ended.code, argv
        with open(f"{place}.json", "w") as file:
            json.dump([name for name in sys.modules if name.split(".")[0] == "kdtrain"], file)
        sys.stderr.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, argv
"""
"""Runs each command of its first argument, a module and its words, in a fork, and writes what of kdtrain it loaded."""
SPEECH = ("said", "says", "told", "asked")
"""Verbs of speech, where the field logs, returns and requests."""
_NO_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file to its syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def lines_of(path: Path) -> int:
    """Count the lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


@cache
def code_of(path: Path) -> tuple[int, int]:
    """Count the lines of a file that hold code, and the characters of its code."""
    texts: set[int] = set()
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTION))
            and ast.get_docstring(node, clean=False) is not None
        ):
            texts.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    held: set[int] = set()
    characters = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in _NO_CODE and token.start[0] not in texts:
            held.update(range(token.start[0], token.end[0] + 1))
            characters += len(token.string)
    return len(held), characters


def conditionals_of(path: Path) -> list[ast.IfExp]:
    """List the conditional expressions of a file."""
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.IfExp)]


def conditionals_within(path: Path) -> int:
    """Count the conditional expressions of a file that hold another one."""
    return sum(
        any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)
        for node in conditionals_of(path)
    )


def times_truth(known: dict[str, Path]) -> Iterator[str]:
    """Yield the places where modules multiply a text or a list by a truth value.

    Of numbers and tensors, only a product with `not` or `and` is found.
    """
    flags = {"bool", *re.findall(r"(\w+): bool\b", "".join(path.read_text() for path in known.values()))}
    for name, path in known.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
                for one, times in ((node.left, node.right), (node.right, node.left)):
                    text = ast.unparse(one).startswith(("'", '"', "f'", 'f"', "[", "("))
                    truth = ast.unparse(getattr(times, "func", times)).rpartition(".")[2] in flags
                    truth = text and (truth or isinstance(times, ast.Compare))
                    if truth or isinstance(getattr(times, "op", None), ast.Not | ast.And):
                        yield f"{name}:{node.lineno}"


def modules() -> dict[str, Path]:
    """Return every module of kdtrain by its dotted name."""
    paths = sorted((ROOT / "kdtrain").rglob("*.py"))
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def loaded() -> dict[str, set[str]]:
    """Return the modules of kdtrain that each import of `STARTS` loads, and a run of two steps from a cache."""
    commands = [[start] for start in STARTS.values()]
    commands += [["kdtrain", *words] for words in (_CAPTURE, [*_CACHED, *_FP32, "--steps", str(_STEPS)])]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", _LOADED, json.dumps(commands)]
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found = [set(json.loads(Path(folder, f"{place}.json").read_text())) for place in range(len(commands))]
        assert json.loads(Path(folder, "run/result.json").read_text())["step"] == _STEPS
    return {**dict(zip(STARTS, found, strict=False)), "a cached run": found[-1]}


def handed_on(module: str, known: dict[str, Path]) -> dict[str, tuple[str, str]]:
    """Return the names that a module imports from others of kdtrain, with the module and the name there."""
    stub = known[module].with_suffix(".pyi")  # of a package that imports its names on demand
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree_of(stub if stub.exists() else known[module]))
        if isinstance(node, ast.ImportFrom) and node.module in known
        for alias in node.names
    }


def origin(module: str, name: str, known: dict[str, Path]) -> tuple[str, str]:
    """Find the module in which a name is defined, and its name there; no name where it is a module itself."""
    if f"{module}.{name}" in known:
        return f"{module}.{name}", ""
    further = handed_on(module, known).get(name)
    return (module, name) if further is None else origin(*further, known)


def used_by(module: str, known: dict[str, Path]) -> set[tuple[str, str]]:
    """Return the modules and names of kdtrain that a module takes: by import, as an attribute or by a string."""
    tree = tree_of(known[module])
    taken = handed_on(module, known)
    whole = {name: ".".join(each) for name, each in taken.items() if ".".join(each) in known}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                whole |= {alias.asname: alias.name} if alias.asname else {top: top}

    def module_of(node: ast.expr) -> str | None:
        """Return the module that an expression stands for."""
        if isinstance(node, ast.Name):
            return whole.get(node.id)
        if isinstance(node, ast.Attribute) and (above := module_of(node.value)) is not None:
            return f"{above}.{node.attr}" if f"{above}.{node.attr}" in known else None
        return None

    found = {origin(*each, known) for each in taken.values()}
    opened = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (above := module_of(node.value)) and above in known:
            opened.add((above, ""))
            found.add(origin(above, node.attr, known))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = {each.value for each in node.args if isinstance(each, ast.Constant)}
            found |= {(name, "") for name in names & known.keys()}
    return found - opened


def used_once(path: Path) -> tuple[int, int]:
    """Count the functions of a file, and its private ones that it mentions once outside of their `def`."""
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, _FUNCTION)]
    mentioned = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Name | ast.Attribute)
    )
    private = [each.name for each in functions if each.name.startswith("_") and not each.name.endswith("__")]
    return len(functions), sum(mentioned[name] == 1 for name in private)


def attributes_of(node: ast.ClassDef) -> int:
    """Count the attributes that the class declares, or sets on itself."""
    declared = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            declared.add(each.attr)
    return len(declared)


def parameters_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the parameters of a function without `self`."""
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def counts() -> dict[str, int]:
    """Compute every count that bounds.toml bounds."""
    known = modules()
    core = {name: path for name, path in known.items() if not name.startswith("kdtrain.plugins")}
    plugins = known.keys() - core.keys()
    found = {"core lines": sum(map(lines_of, core.values()))}
    code = [code_of(path) for path in core.values()]
    found["core lines of code"], found["core characters of code"] = (sum(each) for each in zip(*code, strict=True))
    found["plugin lines"] = sum(lines_of(known[name]) for name in plugins)
    found["plugin characters of code"] = sum(code_of(known[name])[1] for name in plugins)
    used = {each for name in plugins for each in used_by(name, known) if each[0] in core}
    found["core modules that plugins use"] = len({module for module, _ in used})
    found["core names that plugins use"] = len(used)
    for label, names in loaded().items():
        present = names & known.keys()
        found[f"modules loaded by {label}"] = len(present)
        found[f"lines loaded by {label}"] = sum(lines_of(known[name]) for name in present)
    conditionals = sum(len(conditionals_of(path)) for path in core.values())
    found["conditionals per 1,000 lines of code"] = round(1000 * conditionals / found["core lines of code"])
    found["conditionals within conditionals"] = sum(map(conditionals_within, known.values()))
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
    """Count the `attributes` of classes, or the `parameters` of functions, that have more than their bound."""
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
    """Return the names of classes that several modules define, each with its modules."""
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
        print(f"{name:40}{number:11,}{bound:11,}{goal:11,}{'  over' if number > bound else ''}")
    for kind in ("attributes", "parameters"):
        print(kind, large(kind))
    print("names of two classes", shared_names())
