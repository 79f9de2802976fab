"""The packages for a borrowed machine: what is needed and not there is followed, and nothing else is packed."""

import zipfile

import pytest

from benchmarks import pack

WHEELS = {
    "datasets": ["pyarrow>=20", "dill<1", "multiprocess"],
    "multiprocess": ["dill>=0.4"],
    "rich": ["Typing_Extensions>=4", "docstring-parser", "backport; python_version < '3.12'", "colorama; extra == 'x'"],
}


def make_wheel(path, name, needs, more=()):
    files = {f"{name}/__init__.py": "", **dict.fromkeys(more, "x" * 1000)}
    info = f"{name}-1.dist-info"
    metadata = [f"Name: {name}", *(f"Requires-Dist: {need}" for need in needs)]
    files |= {f"{info}/METADATA": "\n".join(metadata) + "\n\nThe text.\nRequires-Dist: not-this\n"}
    record = "".join(f"{each},sha256=0,1\n" for each in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as wheel:
        for each, text in (files | {f"{info}/RECORD": record}).items():
            wheel.writestr(each, text)


@pytest.fixture
def index(monkeypatch):
    """Replace pip by a function that makes a wheel for each name and remembers the names."""
    asked = []

    def download(names, folder):
        for name in names:
            asked.append(name)
            make_wheel(folder / f"{name}-1-py3-none-any.whl", name, WHEELS.get(name, []))

    monkeypatch.setattr(pack, "download", download)
    monkeypatch.setattr(pack, "roots", lambda: {"torch", "datasets", "rich"})
    return asked


def test_wheels_are_followed_to_what_they_require_and_what_is_there_is_left_out(tmp_path, index):
    size = pack.pack(tmp_path / "out", {"torch", "pyarrow", "typing-extensions"})
    assert sorted(index) == ["datasets", "dill", "docstring-parser", "multiprocess", "rich"]
    assert size == sum(wheel.stat().st_size for wheel in (tmp_path / "out").glob("*.whl"))


def test_a_list_of_the_machines_packages_decides_and_too_much_is_exit_1(tmp_path, index, monkeypatch, capsys):
    (tmp_path / "present").write_text(
        "Package Version\n------- -------\ntorch 2.11.0\npyarrow 24.0\nTyping_extensions 4.15\ndill 0.4.1\n"
    )
    words = ["--present", str(tmp_path / "present")]
    assert pack.main(["--out", str(tmp_path / "out"), *words]) == 0
    shown = capsys.readouterr().out
    assert "dill" not in index and "--no-index --no-deps" in shown and "datasets-1-py3" in shown
    assert pack.main(["--out", str(tmp_path / "out"), *words]) == 2 and "exists" in capsys.readouterr().err
    monkeypatch.setattr(pack, "LIMIT", 100)
    assert pack.main(["--out", str(tmp_path / "other"), *words]) == 1


def test_only_the_filters_that_caches_use_are_packed_and_the_wheel_still_lists_its_files(tmp_path):
    wheel = tmp_path / "hdf5plugin-1-py3-none-any.whl"
    filters = [f"hdf5plugin/plugins/libh5{name}.so" for name in ("bshuf", "zstd", "sz3", "blosc")]
    make_wheel(wheel, "hdf5plugin", [], filters)
    pack.trim(wheel)
    with zipfile.ZipFile(wheel) as content:
        names, record = content.namelist(), content.read("hdf5plugin-1.dist-info/RECORD").decode()
    assert {name for name in names if "libh5" in name} == set(filters[:2])
    assert sorted(line.partition(",")[0] for line in record.splitlines()) == sorted(names)


def test_what_kdtrain_and_its_extras_require_is_where_packing_begins():
    assert {"torch", "datasets", "hdf5plugin", "msgspec", "torchao", "trl", "liger-kernel"} <= pack.roots()
