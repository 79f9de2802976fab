"""The house: allowed imports, what loads nothing heavy, and the docstrings that every file has.

The rules are read off the syntax trees of all modules, so that an import inside a function or under
TYPE_CHECKING counts as well. The floors are those of `STAIRCASE`.
"""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kdtrain"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 600

STAIRCASE = (
    *("errors", "imports", "faults", "registry", "files", "outputs", "sandbox", "process", "tables", "ranks"),
    *("config", "net"),
    *("data", "models", "objective", "precision", "cache", "checkpoint", "monitor", "parallel", "teaching"),
    *("tokenizers", "training", "run", "commands", "cli", "library", "callback", "plugins", "testing", "__main__"),
)
"""A floor may import the floors above it in this list, never one below; `kdtrain` itself is the library's face."""

HEAVY = ("torch", "transformers", "datasets", "h5py", "matplotlib")


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = frozenset(name_of(path) for path in MODULES)


def room_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "kdtrain"


@cache
def imported_names(tree: ast.AST, package: str) -> set[str]:
    """Return every dotted name that the module imports, in any way and at any depth."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names |= {f"{source}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return names


def own_module(name: str, known: frozenset[str]) -> str:
    """Return the module or room of an imported name: `kdtrain.errors` for `kdtrain.errors.UsageError`."""
    while name not in known and name.count(".") > 1:
        name = name.rpartition(".")[0]
    return name if name in known or room_of(name) in STAIRCASE else "kdtrain"


def imported_modules(name: str, tree: ast.AST, is_package: bool, known: frozenset[str] = NAMES) -> set[str]:
    """Return kdtrain's own modules that one of them imports."""
    package = name if is_package else name.rpartition(".")[0]
    return {own_module(each, known) for each in imported_names(tree, package) if each.split(".")[0] == "kdtrain"}


def forbidden_imports(name: str, tree: ast.AST, is_package: bool, known: frozenset[str] = NAMES) -> list[str]:
    """List the imports of one module that go down the staircase."""
    room = room_of(name)
    above = {"kdtrain", *(STAIRCASE if room == "kdtrain" else STAIRCASE[: STAIRCASE.index(room) + 1])}
    return [each for each in sorted(imported_modules(name, tree, is_package, known)) if room_of(each) not in above]


def circles(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Find the largest sets of modules that all import each other, directly or through one another."""

    def reached(name: str) -> set[str]:
        found: set[str] = set()
        to_visit = [name]
        while to_visit:
            further = imports.get(to_visit.pop(), set()) - found
            found |= further
            to_visit += further
        return found

    reach = {name: reached(name) for name in imports}
    return {frozenset(each for each in reach[name] if name in reach[each]) for name in imports if name in reach[name]}


def test_every_module_lies_in_a_room_of_the_house():
    assert [path for path in MODULES if room_of(name_of(path)) not in ("kdtrain", *STAIRCASE)] == []
    folders = {path.parent for path in MODULES}
    assert [each for each in folders if not (each / "__init__.py").exists()] == [], "they would not be installed"
    taken = [each for each in folders if {"build", "dist"} & {*each.relative_to(PACKAGE).parts}]
    assert taken == [], "tools take such a folder for output"


def test_a_module_imports_floors_above_its_own_and_never_one_below():
    found = {path: forbidden_imports(name_of(path), tree_of(path), path.name == "__init__.py") for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "importer, line",
    [
        ("kdtrain.data.corpus", "import kdtrain.models.spec"),
        ("kdtrain.data.corpus", "from kdtrain.models import spec"),
        ("kdtrain.data.corpus", "from kdtrain import models"),
        ("kdtrain.data.corpus", "from ..models.spec import ModelSpec"),
        ("kdtrain.data.corpus", "from ..models import spec"),
        ("kdtrain.data.corpus", "def late():\n    from kdtrain.training.trainer import train"),
        ("kdtrain.data.corpus", "import importlib\nimportlib.import_module('kdtrain.models.spec')"),
        ("kdtrain.objective.loss", "from kdtrain.cache.read.reader import CacheReader"),
        ("kdtrain.monitor.writers", "from kdtrain.training.trainer import train"),
        ("kdtrain.training.trainer", "from kdtrain.commands.distill import main"),
        ("kdtrain.files", "from kdtrain.ranks import rank"),
        ("kdtrain.registry", "from kdtrain.config import DistillConfig"),
        ("kdtrain.commands.distill", "from kdtrain import cli"),
        ("kdtrain.config", "from kdtrain.models.spec import ModelSpec"),
        ("kdtrain.errors", "from kdtrain.config import DistillConfig"),
    ],
)
def test_an_import_down_the_staircase_is_found(importer, line):
    assert forbidden_imports(importer, ast.parse(line), False)


@pytest.mark.parametrize(
    "importer, line",
    [
        ("kdtrain.cache.read.reader", "from kdtrain.objective.targets import SparseTargets"),
        ("kdtrain.cache.read.reader", "from kdtrain.objective import targets"),
        ("kdtrain.checkpoint.store", "from kdtrain.ranks import World"),
        ("kdtrain.data.corpus", "from kdtrain.data.order import batch"),
        ("kdtrain.data.corpus", "from . import packing"),
        ("kdtrain.data.corpus", "from kdtrain.errors import UsageError"),
        ("kdtrain.data.corpus", "from kdtrain import __version__, faults"),
        ("kdtrain.commands.distill", "from kdtrain.models.loading import load_student"),
        ("kdtrain.config", "from kdtrain.errors import UsageError"),
        ("kdtrain.testing", "from kdtrain.models.loading import load_student"),
    ],
)
def test_an_import_up_the_staircase_or_within_the_room_is_allowed(importer, line):
    known = NAMES | {"kdtrain.objective.targets", "kdtrain.ranks", "kdtrain.data.packing"}
    assert forbidden_imports(importer, ast.parse(line), False, known) == []


def plugin_of(name: str) -> str:
    parts = name.split(".")
    return parts[2] if parts[1:2] == ["plugins"] and len(parts) > 2 else ""


def test_nothing_outside_of_plugins_imports_one_and_none_imports_another():
    for path in MODULES:
        name = name_of(path)
        for other in imported_modules(name, tree_of(path), path.name == "__init__.py"):
            assert room_of(other) != "plugins" or plugin_of(name) == plugin_of(other), (name, other)


def test_a_plugin_imports_only_what_the_page_of_the_library_names_as_stable():
    (listed,) = re.findall(r"^```text\n(kdtrain\..*?)^```", (ROOT / "docs/library.md").read_text(), re.M | re.S)
    stable = {"kdtrain", *(line.split()[0] for line in listed.splitlines() if line[0] != " ")}
    assert {each for each in stable if each not in NAMES or room_of(each) == "run"} == set()
    for path in MODULES:
        if plugin := plugin_of(name_of(path)):
            found = imported_modules(name_of(path), tree_of(path), path.name == "__init__.py")
            assert {each for each in found if plugin_of(each) != plugin} <= stable, path


def test_no_files_import_each_other_in_a_circle():
    imports = {
        name_of(path): imported_modules(name_of(path), tree_of(path), path.name == "__init__.py") for path in MODULES
    }
    imports["kdtrain"] = set()  # the library's face imports each when it is asked for it
    assert circles({name: found - {name} for name, found in imports.items()}) == set()


@pytest.mark.parametrize(
    "imports, found",
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, ["ab"]),
        ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a", "d"}}, ["abc", "de"]),
        ({"a": {"b", "c"}, "b": {"a"}, "c": {"a"}}, ["abc"]),
    ],
)
def test_a_circle_is_found_however_long_it_is(imports, found):
    assert circles(imports) == {frozenset(each) for each in found}


@pytest.mark.parametrize(
    "line",
    [
        "from kdtrain.data.packing import pack",
        "from . import packing",
        "if TYPE_CHECKING:\n    from kdtrain.data.packing import pack",
        "def late():\n    import kdtrain.data.packing",
        "import importlib\nimportlib.import_module('kdtrain.data.packing')",
    ],
)
def test_an_import_of_a_file_is_seen_wherever_it_stands(line):
    assert imported_modules("kdtrain.data.corpus", ast.parse(line), False) == {"kdtrain.data.packing"}


def test_no_module_is_longer_than_600_lines():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_every_module_and_every_public_function_and_class_has_a_docstring():
    assert [path for path in MODULES if not ast.get_docstring(tree_of(path))] == []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    named = [(path, node) for path in MODULES for node in tree_of(path).body if isinstance(node, kinds)]
    public = [(path, node) for path, node in named if not node.name.startswith("_")]
    assert [(path, node.name) for path, node in public if not ast.get_docstring(node)] == []


def test_importing_the_command_loads_nothing_heavy():
    code = f"import sys, kdtrain.cli; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    found = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(package): version for package, version in found.items()}


def test_the_oldest_release_of_each_dependency_that_is_allowed_is_the_one_that_is_tested():
    oldest = pins("constraints-oldest.txt")
    for line in [*project()["dependencies"], *project()["optional-dependencies"]["fp8"]]:
        requirement = Requirement(line)
        (bound,) = requirement.specifier
        lowest, tested = Version(bound.version).release, Version(oldest[canonicalize_name(requirement.name)]).release
        assert bound.operator == ">=" and tested[: len(lowest)] == lowest and not any(tested[len(lowest) : 2]), line


def test_every_requirement_is_pinned_to_a_version_that_satisfies_it():
    versions = pins("constraints.txt")
    extras = project()["optional-dependencies"].values()
    for line in [*project()["dependencies"], *(line for extra in extras for line in extra)]:
        requirement = Requirement(line)
        if requirement.name == "kdtrain":  # an extra that takes others in
            continue
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), line


def imported_tops(path: Path) -> set[str]:
    """Return the first parts of all names that a module imports."""
    return {name.split(".")[0] for name in imported_names(tree_of(path), name_of(path).rpartition(".")[0])}


def test_every_import_is_a_declared_requirement():
    extras = project()["optional-dependencies"].values()
    lines = [*project()["dependencies"], *(line for extra in extras for line in extra)]
    declared = {canonicalize_name(Requirement(line).name) for line in lines}
    for path in MODULES:
        foreign = imported_tops(path) - sys.stdlib_module_names - {"kdtrain"}
        assert {canonicalize_name(name) for name in foreign} <= declared, path


def test_torchao_is_imported_by_the_fp8_back_end_alone_and_matplotlib_by_what_draws():
    found = {"torchao": set(), "matplotlib": set()}
    for path in MODULES:
        for top in imported_tops(path) & found.keys():
            found[top].add(name_of(path))
    draw = {"kdtrain.plugins.find_lr.command", "kdtrain.plugins.papers.figures"}
    assert found == {"torchao": {"kdtrain.precision.backends"}, "matplotlib": draw}
    required = {Requirement(line).name for line in project()["dependencies"]}
    assert not required & {"torchao", "matplotlib"}


LEFT_OUT = [ROOT / name for name in ("runs", "build", "dist", "teachers/build")]
BINARY = {".png", ".safetensors", ".h5", ".pyc", ".gz", ".parquet", ".arrow", ".npz"}
UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E)\b")
ABOUT_A_MACHINE = re.compile(r"(?<![\w.~$/}>)*-])/(?:home|root|Users|work|workspace|opt|mnt)/\w")


def texts() -> list[Path]:
    """List every text file of the repository; what git ignores is left out by its place."""
    found = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in (".ci", ".gitignore") for part in parts)
        if hidden or "__pycache__" in parts or path.suffix in BINARY or not path.is_file():
            continue
        if any(path.is_relative_to(folder) for folder in LEFT_OUT):
            continue
        if (parts[0] == "cache" and parts != ("cache", "README.md")) or parts[0].endswith(".egg-info"):
            continue
        found.append(path)
    return sorted(found)


def test_the_parts_of_a_run_do_not_know_the_trainer_that_holds_them():
    for path in {*(PACKAGE / "training").glob("*.py")} - {PACKAGE / "training/trainer.py"}:
        imported = imported_names(tree_of(path), "kdtrain.training")
        assert [name for name in imported if name.startswith("kdtrain.training.trainer")] == [], path
        assert "trainer" not in [each.arg for each in ast.walk(tree_of(path)) if isinstance(each, ast.arg)], path


def findings(text: str) -> list[str]:
    """Find the lines that postpone work, or that name a path on one machine."""
    rules = [UNFINISHED, ABOUT_A_MACHINE]
    if len(ROOT.parts) > 2:
        rules.append(re.compile(re.escape(str(ROOT)) + r"(?![\w-])"))
    return [line for line in text.splitlines() if any(rule.search(line) for rule in rules)]


def test_no_file_postpones_work_or_names_a_path_of_one_machine():
    found = {str(path.relative_to(ROOT)): findings(path.read_text(encoding="utf-8")) for path in texts()}
    assert {name: lines for name, lines in found.items() if lines} == {}
    modules = {str(each.relative_to(ROOT)) for each in MODULES}
    assert found.keys() >= {"Makefile", "pyproject.toml", "tests/test_house.py"} | modules


@pytest.mark.parametrize(
    "line, counts",
    [
        ("# TO" + "DO: later", True),
        ("x = 1  # FIX" + "ME", True),
        ('"spec": "/ho' + 'me/ada/teacher.toml"', True),
        (f"see {ROOT}/README.md", True),
        ("its todo list", False),
        ("kdtrain/work/x and https://example.org/home/x and ~/opt/x", False),
    ],
)
def test_the_search_finds_postponed_work_and_paths(line, counts):
    assert bool(findings(line)) is counts
