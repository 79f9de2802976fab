"""Files of others are read within bounds; kdtrain removes or renames only its own files, never through a link.

That nothing else in the project removes, replaces or renames is read off the syntax trees.
"""

import ast
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from kdtrain import files
from kdtrain.errors import RunError, UsageError

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kdtrain", "benchmarks", "teachers")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

REMOVING = {"unlink", "rmtree", "rmdir", "removedirs", "rename", "renames", "move"}
OF_MODULES = {"os", "shutil", "Path", "pathlib"}


def removals(tree: ast.AST) -> list[str]:
    """Find calls that remove, replace or rename a file.

    `replace` of strings, dataclasses and tensors is something else.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            found += [each.name for each in node.names if each.name in REMOVING | {"remove", "replace"}]
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name, owner = node.func.attr, node.func.value
        module = isinstance(owner, ast.Name) and owner.id in OF_MODULES
        path_replace = name == "replace" and len(node.args) == 1 and not node.keywords
        if name in REMOVING or (module and name in ("remove", "replace")) or path_replace:
            found.append(ast.unparse(node))
    return found


def test_nothing_but_the_files_room_removes_replaces_or_renames():
    found = {str(path.relative_to(ROOT)): removals(ast.parse(path.read_text(encoding="utf-8"))) for path in SOURCES}
    assert {name for name, calls in found.items() if calls} == {"kdtrain/files.py"}, found


@pytest.mark.parametrize(
    "line, counts",
    [
        ("path.unlink(missing_ok=True)", True),
        ("shutil.rmtree(folder)", True),
        ("os.replace(a, b)", True),
        ("os.remove(a)", True),
        ("path.replace(other)", True),
        ("path.rename(other)", True),
        ("from os import replace", True),
        ("text.replace('a', 'b')", False),
        ("names.remove('a')", False),
        ("dataclasses.replace(config, out=out)", False),
    ],
)
def test_the_search_finds_every_kind_of_removal(line, counts):
    assert bool(removals(ast.parse(line))) is counts


@pytest.fixture
def strange(tmp_path):
    """Make paths that are not regular files, by kind."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    return tmp_path


@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_anything_but_a_regular_file_is_refused_and_does_not_block(strange, kind):
    for read in (files.read_text, files.file_digest, files.read_sealed, files.read_toml):
        with pytest.raises(ValueError, match="is not a regular file"):
            read(strange / kind)


def test_a_file_that_is_too_large_is_not_read_into_memory(tmp_path):
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(2**40)  # sparse: a terabyte that takes no room
    with pytest.raises(ValueError, match="more than 1,048,576 bytes"):
        files.read_json(tmp_path / "large.json", dict)


@pytest.mark.parametrize("depth", [65, 900, 200_000])
def test_a_record_nested_too_deep_is_refused(tmp_path, depth):
    (tmp_path / "deep.json").write_text('{"a":' * depth + "1" + "}" * depth)
    (tmp_path / "deep.toml").write_text("a = " + "[" * depth + "]" * depth)
    (tmp_path / "dotted.toml").write_text(".".join("a" * depth) + " = 1")
    with pytest.raises(ValueError, match=r"nested too deep|more than|too many dots"):
        files.read_json(tmp_path / "deep.json", dict)
    for name in ("deep.toml", "dotted.toml"):
        with pytest.raises(ValueError, match=r"nested too deep|more than|too many dots"):
            files.read_toml(tmp_path / name)


def test_a_record_of_too_many_entries_is_not_built_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files.json, "loads", lambda text: pytest.fail("it was parsed"))
    for entry in ("[],", "{},", "1,"):
        (tmp_path / "manifest.json").write_text('{"a":[' + entry * 2**20 + "1]}")
        with pytest.raises(ValueError, match="more than 1,048,576 entries"):
            files.read_sealed(tmp_path / "manifest.json", files.MEDIUM)


@pytest.mark.parametrize(
    "line",
    [
        "b{number}." + ".".join("a" * 17) + " = 1\n",
        "[b{number} . " + " . ".join("a" * 17) + "]\n",
        "[[b{number}." + ".".join("a" * 17) + "]]\n",
        "b{number} = {{ '='." + '."#=".' * 17 + "c = 1 }}\n",
        "b{number}.'[{{'" + "." + '."\\"=".' * 17 + "c = 1\n",
    ],
)
def test_a_key_of_many_parts_is_refused_before_it_slows_the_parser(tmp_path, monkeypatch, line):
    line = line.replace("..", ".")
    (tmp_path / "a.toml").write_text("".join(line.format(number=number) for number in range(3)))
    with monkeypatch.context() as patched:
        patched.setattr(files.tomllib, "loads", lambda text: pytest.fail("it was parsed"))
        with pytest.raises(ValueError, match="too many dots"):
            files.read_toml(tmp_path / "a.toml")
    text = line.format(number=0)
    assert files.tomllib.loads(text), "it is TOML"


def test_dots_outside_of_keys_are_allowed(tmp_path):
    (tmp_path / "a.toml").write_text(f"a = [{'0.5, ' * 5000}]\nb.c = '{'. ' * 500}'  # {'.' * 200}\n")
    assert len(files.read_toml(tmp_path / "a.toml")["a"]) == 5000


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    parts: list[Inner]


def test_a_record_of_other_types_is_refused_with_its_key(tmp_path):
    (tmp_path / "a.json").write_text('{"parts": [{"size": 1}, {"size": "2"}]}')
    with pytest.raises(ValueError, match=r"Expected int, got str - at parts\[1\].size"):
        files.read_json(tmp_path / "a.json", Outer)
    (tmp_path / "a.json").write_text('{"parts": [{"size": 1}]}')
    assert files.read_json(tmp_path / "a.json", Outer) == Outer([Inner(1)])


def test_a_published_file_is_whole_or_the_earlier_one_and_no_other_file_is_left(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        files.publish_text(path, "half\udcff", "x")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    files.publish_text(path, "after", "x")
    assert path.read_text() == "after" and list(tmp_path.iterdir()) == [path]


def test_two_writers_never_share_a_temporary_name(tmp_path):
    assert len({files.temporary_name(tmp_path / "a") for _ in range(100)}) == 100


def test_a_link_is_redirected_and_anything_but_a_link_is_left_alone(tmp_path):
    files.point_link(tmp_path / "best", "one")
    files.point_link(tmp_path / "best", "two")
    assert os.readlink(tmp_path / "best") == "two"
    (tmp_path / "latest").mkdir()
    with pytest.raises(OSError, match="it is not a link"):
        files.point_link(tmp_path / "latest", "one")
    files.remove_link(tmp_path / "latest")
    files.remove_link(tmp_path / "best")
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_a_file_set_aside_keeps_its_bytes_and_takes_no_used_name(tmp_path):
    for text in ("one", "two"):
        (tmp_path / "a.h5").write_text(text)
        files.set_aside(tmp_path, "a.h5", "damaged")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "a.h5.damaged-1": "one",
        "a.h5.damaged-2": "two",
    }


def test_nothing_is_set_aside_through_a_link_and_a_link_itself_is(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.h5").write_text("mine")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "shards").symlink_to("../docs")
    with pytest.raises(UsageError, match="shards is a link"):
        files.set_aside(tmp_path / "cache", "shards/a.h5", "damaged")
    files.set_aside(tmp_path / "cache", "shards", "damaged")
    assert (tmp_path / "cache" / "shards.damaged-1").is_symlink()
    assert (tmp_path / "docs" / "a.h5").read_text() == "mine"


def test_a_folder_is_removed_only_if_its_seal_lists_every_file(tmp_path):
    def folder(*names: str) -> Path:
        path = tmp_path / "x"
        path.mkdir(exist_ok=True)
        for name in names:
            (path / name).write_text("")
        return path

    assert not files.remove_folder(folder("a", "mine"), {"a"}, "x")
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["a", "mine"]
    assert not files.remove_folder(folder(), set(), "x")
    (tmp_path / "link").symlink_to("x")
    assert not files.remove_folder(tmp_path / "link", {"a", "mine"}, "x")
    assert files.remove_folder(folder(), {"a", "mine"}, "x")
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_a_sweep_removes_temporary_files_of_kdtrain_and_nothing_else(tmp_path):
    kept = [".notes.tmp", ".a.0123456789ab", "a.0123456789ab.tmp", ".b.0123456789aB.tmp", "c.tmp"]
    kept += [".a.h5.0123456789ab.tmp", ".a.h5.0123456789abcdef.tmp"]  # of some other program
    own = files.temporary_name(tmp_path / "a.h5")
    kept += [own.name.replace(".a.", ".b."), own.name.removesuffix(".tmp"), f".x{own.name}"]
    for name in kept:
        (tmp_path / name).write_text("")
    own.write_text("")
    hidden = files.temporary_name(tmp_path / "step-1")
    hidden.mkdir()
    (hidden / "half").symlink_to(tmp_path / "c.tmp")
    files.temporary_name(tmp_path / "d").symlink_to("..")
    files.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    (tmp_path / "link").symlink_to(".")
    own.write_text("")
    files.sweep(tmp_path / "link")
    assert own.exists()


@pytest.mark.parametrize("name", ["a", "a.b", "a" * 50, "b" * 51, "b" * 52, "\U0001f600" * 60, "a\udcff"], ids=len)
def test_a_sweep_of_one_name_leaves_the_temporary_files_of_all_others(tmp_path, name):
    others = [files.temporary_name(tmp_path / other) for other in ("a.b.c", f"{name}x", f"x{name}", name[:-1] or "b")]
    for path in (*others, files.temporary_name(tmp_path / name)):
        path.mkdir()
    files.sweep(tmp_path, of=name)
    assert sorted(tmp_path.iterdir()) == sorted(others)


def test_what_a_sweep_cannot_remove_stays_and_stops_nobody(tmp_path, monkeypatch):
    paths = [files.temporary_name(tmp_path / name) for name in "ab"]
    paths[0].mkdir()
    paths[1].write_text("")
    with monkeypatch.context() as closed:
        closed.setattr(os, "rmdir", _refuse)
        closed.setattr(os, "unlink", _refuse)
        closed.setattr(Path, "unlink", _refuse)
        files.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def _refuse(*_, **__):
    raise PermissionError(13, "Permission denied")


@pytest.fixture
def mounted(tmp_path):
    """Return a folder on which another one of the same disk is mounted."""
    (tmp_path / "source").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    if subprocess.run(["mount", "--bind", tmp_path / "source", target], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield target
    subprocess.run(["umount", target], check=True)


def test_a_mount_point_is_named_before_it_is_moved_or_replaced(mounted, tmp_path):
    assert files.is_mount(mounted) and files.is_mount(Path("/")) and files.is_mount(Path("/proc"))
    assert not files.is_mount(tmp_path) and not files.is_mount(tmp_path / "none")
    (tmp_path / "new").mkdir()
    for action in (
        lambda: files.refuse_displacing(mounted, {}),
        lambda: files.set_aside(tmp_path, "target", "old"),
        lambda: files.swap_in(tmp_path / "new", mounted, "x"),
    ):
        with pytest.raises(
            UsageError, match="target is a mount point, which cannot be moved or replaced; name a folder"
        ):
            action()
    assert (tmp_path / "new").is_dir()


def test_links_in_a_folder_that_is_written_to_are_refused_by_name(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best").symlink_to("nowhere")
    files.refuse_links(tmp_path, ["checkpoints/best"])
    with pytest.raises(UsageError, match="best is a link"):
        files.refuse_links(tmp_path)


def test_links_below_a_real_folder_of_another_program_are_its_own_and_that_folder_is_no_link(tmp_path):
    (tmp_path / "wandb" / "wandb").mkdir(parents=True)
    (tmp_path / "wandb" / "latest-run").symlink_to("wandb")
    (tmp_path / "wandb" / "wandb" / "core.log").symlink_to("/nowhere")
    files.refuse_links(tmp_path, ["wandb/"])
    for elsewhere in ("data/wandb", "wandb.json", "wandb2", "wand"):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / elsewhere).symlink_to("/nowhere")
        with pytest.raises(UsageError, match=f"{elsewhere} is a link"):
            files.refuse_links(tmp_path, ["wandb/"])
        (tmp_path / elsewhere).unlink()
    (tmp_path / "wandb").rename(tmp_path.parent / "real")
    (tmp_path / "wandb").symlink_to("../real")
    with pytest.raises(UsageError, match="wandb is a link"):
        files.refuse_links(tmp_path, ["wandb/"])


def test_a_temporary_link_of_a_killed_command_is_not_refused(tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "kept").touch()
    with monkeypatch.context() as killed:
        killed.setattr(os, "replace", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            files.point_link(tmp_path / "latest", "target")
    assert any(path.is_symlink() for path in tmp_path.iterdir())
    files.refuse_links(tmp_path)
    files.sweep(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "kept"]


def _interrupt(*_):
    raise KeyboardInterrupt


def test_a_lock_follows_no_link_and_does_not_block_on_a_pipe(strange):
    (strange / "victim").write_text("mine")
    (strange / "lock").symlink_to("victim")
    with pytest.raises(RunError, match="lock: Too many levels"):
        files.Lock(strange / "lock", "held", "me")
    assert (strange / "victim").read_text() == "mine"
    with pytest.raises(RunError, match="is not a regular file"):
        files.Lock(strange / "pipe", "held")


def test_a_lock_ends_with_its_process(tmp_path):
    code = "import sys, time; from pathlib import Path; from kdtrain.files import Lock\n"
    code += "held = Lock(Path(sys.argv[1]), 'held', 'other'); print('held', flush=True); time.sleep(60)"
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match="busy"):
            files.Lock(path, "busy", "another", wait=60)
        assert files.is_locked(path)
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert files.is_locked(path) is False
    files.Lock(path, "busy").release()
    assert not path.exists()


def test_a_lock_waits_for_a_holder_of_its_name_and_for_who_looks_at_it(tmp_path):
    path = tmp_path / "lock"
    held = files.Lock(path, "busy", "me")
    threading.Timer(0.5, held.release).start()
    files.Lock(path, "busy", "me", wait=60).release()
    path.touch()
    looking = os.open(path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)  # as `is_locked` does
    threading.Timer(0.05, os.close, [looking]).start()
    files.Lock(path, "busy").release()


def test_a_lock_that_was_moved_with_its_folder_does_not_remove_the_one_that_came_after(tmp_path):
    (tmp_path / "a").mkdir()
    first = files.Lock(tmp_path / "a/lock", "busy")
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").mkdir()
    second = files.Lock(tmp_path / "a/lock", "busy")
    first.release()
    assert files.is_locked(tmp_path / "a/lock")
    second.release()
    assert not (tmp_path / "a/lock").exists()


def test_where_there_are_no_locks_nobody_is_excluded(tmp_path, monkeypatch):
    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    locks = [files.Lock(tmp_path / "lock", "busy") for _ in range(2)]
    assert files.is_locked(tmp_path / "lock") is None
    for each in locks:
        each.release()
