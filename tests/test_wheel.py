"""The wheel: what it carries, and that it works from a folder that has no clone."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import kdtrain

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    pytest.importorskip("setuptools")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("kdtrain", "teachers", "students", "benchmarks/science", "tests/models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, check=True, capture_output=True, timeout=120)
    return next(out.glob("kdtrain-*.whl"))


def test_every_package_is_in_the_wheel():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in ROOT.glob("kdtrain/**/__init__.py")}
    assert set(packages) == found | {"kdtrain.shipped"}


def test_a_wheel_has_the_small_teacher_and_the_students_recipes_and_nothing_else_of_the_bench(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {name.removeprefix("kdtrain/shipped/") for name in names if name.startswith("kdtrain/shipped/")}
    recipes = {f"students/{path.name}" for path in ROOT.glob("students/*.toml")}
    teacher = {f"teachers/stdlib-5m/{path.name}" for path in ROOT.glob("teachers/stdlib-5m/*")}
    assert shipped == recipes | teacher | {"teachers/smollm2-135m.toml", "teachers/stdlib-5m.toml"}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kdtrain"}
    assert wheel.stat().st_size < 12e6


def test_an_installed_wheel_finds_the_teacher_from_an_empty_folder(wheel, tmp_path):
    site, here = tmp_path / "site", tmp_path / "here"
    zipfile.ZipFile(wheel).extractall(site)
    here.mkdir()
    program = (
        "import sys\n"
        "sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in getattr(each, '__module__', '')]\n"
        f"sys.path.insert(0, {str(site)!r})\n"
        "import kdtrain.cli\n"
        "from kdtrain.models import spec\nread = spec.ModelSpec.read\n"
        "print(spec.__file__, read('stdlib-5m', 'teachers').source, read('stdlib-1m').tokenizer)"
    )
    answer = subprocess.run([sys.executable, "-c", program], cwd=here, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    module, source, tokenizer = answer.stdout.split()
    teacher = site / "kdtrain" / "shipped" / "teachers" / "stdlib-5m"
    assert module == str(site / "kdtrain" / "models" / "spec.py")
    assert source == tokenizer == str(teacher) and (teacher / "model.safetensors").is_file()


def test_the_citation_and_the_changelog_are_of_this_version():
    assert f"\nversion: {kdtrain.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{kdtrain.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
