"""The house keeps the size that bounds.toml allows it."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"house_{name}", Path(__file__).parent / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module


house, same_bits = _loaded("counts"), _loaded("same_bits")


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    return house.counts()


@pytest.mark.parametrize("name", house.BOUNDS["house"])
def test_a_count_of_the_house_is_within_its_bound(counted, name):
    assert counted[name] <= house.BOUNDS["house"][name], "raise bounds.toml only by what a plan allows"


@pytest.mark.parametrize("what", ["import", "run"])
def test_an_import_or_a_run_that_fails_is_no_count(monkeypatch, what):
    monkeypatch.setattr(house, "STARTS", {"nothing": "kdtrain.nothing"} if what == "import" else {})
    monkeypatch.setattr(house, "_CAPTURE", ["cache-teacher", "--no-such-option"])
    monkeypatch.setattr(house, "_LOADED", re.sub(".*torch.*\n", "", house._LOADED))  # neither comes to need it
    with pytest.raises(AssertionError, match=r"kdtrain\.nothing" if what == "import" else "no-such-option"):
        house.loaded()


@pytest.mark.parametrize(
    "line, used",
    [
        ("from kdtrain import f", {("kdtrain.inner", "f")}),
        ("from kdtrain import outer\nouter.g()", {("kdtrain.inner", "f")}),
        ("import kdtrain as kd\nkd.outer.g()\nkd.inner.h", {("kdtrain.inner", "f"), ("kdtrain.inner", "h")}),
        ("def late():\n    import kdtrain.inner\n    kdtrain.inner.h()", {("kdtrain.inner", "h")}),
        ("import importlib\nimportlib.import_module('kdtrain.inner')", {("kdtrain.inner", "")}),
        ("from kdtrain import inner", {("kdtrain.inner", "")}),
    ],
)
def test_what_a_plugin_uses_is_followed_to_where_it_is_defined(tmp_path, line, used):
    texts = {"kdtrain": "from kdtrain.outer import g as f", "kdtrain.outer": "from kdtrain.inner import f as g"}
    texts |= {"kdtrain.inner": "def f(): ...\ndef h(): ...", "kdtrain.plugins.x": line}
    known = {name: tmp_path / f"{name}.py" for name in texts}
    for name, text in texts.items():
        known[name].write_text(text)
    assert house.used_by("kdtrain.plugins.x", known) == used


def test_each_name_that_plugins_use_stands_below_its_module_on_the_page_of_the_library():
    page = (Path(__file__).parents[2] / "docs/library.md").read_text()
    (listed,) = re.findall(r"^```text\n(kdtrain\..*?)^```", page, re.M | re.S)
    listed_names = set()
    for line in listed.splitlines():
        if line[0] != " ":
            module = line.split()[0]
        else:
            listed_names |= {(module, name.strip()) for name in line.split(",") if name.strip()}
    known = house.modules()
    used = {each for name in known if name.startswith("kdtrain.plugins") for each in house.used_by(name, known)}
    assert listed_names == {each for each in used if not each[0].startswith(("kdtrain.plugins", "kdtrain.library"))}


def test_characters_of_code_do_not_change_with_comments_and_lines_and_each_conditional_within_another_counts(tmp_path):
    short, long = tmp_path / "short.py", tmp_path / "long.py"
    short.write_text("a = 1 if b else (2 if c else 3)\nd = f(1 if b else 2)\n")
    long.write_text(
        '"""A module.\n\nMore.\n"""\n\na = 1 if b else (  # why\n    2 if c else 3\n)\nd = f(\n    1 if b else 2\n)\n'
    )
    assert [house.code_of(each) for each in (short, long)] == [(2, 35), (6, 35)]
    assert [house.conditionals_within(each) for each in (short, long)] == [1, 1]
    assert [len(house.conditionals_of(each)) for each in (short, long)] == [3, 3]


def test_no_conditional_stands_within_another_and_no_text_is_multiplied_by_a_truth_value(tmp_path):
    (long := tmp_path / "long.py").write_text("def f(a: bool, b):\n 's' * a\n [b] * (b > 1)\n b * (not a)\n b * len(b)")
    assert [*house.times_truth({"long": long})] == ["long:2", "long:3", "long:4"]
    nested = [name for name, path in house.modules().items() if house.conditionals_within(path)]
    assert [*nested, *house.times_truth(house.modules())] == []


def test_every_count_has_a_bound_and_no_goal_lies_above_one(counted):
    assert counted.keys() == house.BOUNDS["house"].keys()
    assert {name for name, goal in house.BOUNDS["goal"].items() if goal > house.BOUNDS["house"][name]} == set()


@pytest.mark.parametrize("kind", house.BOUNDS["each"])
def test_no_class_and_no_function_is_larger_than_its_bound_but_those_that_are_named(kind):
    assert house.large(kind).keys() == set(house.BOUNDS["larger"][kind])


def test_no_two_classes_share_a_name_but_those_that_are_named():
    assert house.shared_names().keys() == set(house.BOUNDS["larger"]["names"])


def test_two_trees_with_the_same_code_are_not_compared(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["same_bits.py", str(house.ROOT)])
    with pytest.raises(SystemExit, match="2"):
        same_bits.main()
    assert "has the code of this tree" in capsys.readouterr().err


def test_a_key_is_left_out_by_its_whole_name_alone():
    before = {"a": {"seconds": 1.0, "generated": 5, "rows": [{"tok/s": 2.0}]}, "b": {"generated": 5}}
    after = {"a": {"seconds": 3.0, "generated": 5, "rows": [{"tok/s": 4.0}]}, "b": {"generated": 6}}
    assert same_bits.different(before, after, same_bits.MEASURED) == ["b"]
    assert same_bits.different(before, {}, same_bits.MEASURED) == ["a", "b"]
