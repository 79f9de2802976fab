"""Whether a command ended as it should: its exit code, its one line, its time, and what it changed on the disk."""

import hashlib
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any

from tests.hostile.case import Case, Place
from tests.hostile.server import MEMORY, Done

Tree = dict[str, tuple[Any, ...]]

_LOG = re.compile(r"\d\d:\d\d ")
_OURS = "kdtrain: "
_LONGEST = 10_000
_DIGEST = re.compile(r"own digest|SHA-256")
_LARGEST_READ = 2**26


def tree(root: Path) -> Tree:
    """Describe all below a folder, links not followed: kind and mode, size, time, inode, and content or target."""
    found: Tree = {}
    for folder, folders, files in os.walk(root):
        for name in [*folders, *files]:
            path = Path(folder, name)
            seen = path.lstat()
            facts: tuple[Any, ...] = (stat.filemode(seen.st_mode),)
            if path.is_symlink():
                facts += (os.readlink(path),)
            elif stat.S_ISREG(seen.st_mode):
                facts += (seen.st_size, seen.st_mtime_ns, seen.st_ino, _content(path, seen.st_size))
            found[os.path.relpath(path, root)] = facts
    return found


def _content(path: Path, size: int) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if size <= _LARGEST_READ else "large"
    except OSError:
        return "unreadable"


def failures(case: Case, done: Done, place: Place, before: Tree, sound: dict[str, Any]) -> list[str]:
    """List what is wrong with how a case ended, one phrase each, the kind of failure first; empty where nothing is."""
    found = []
    if done.hung:
        found.append(f"hung: killed after {done.seconds:.0f} s")
    elif "Traceback (most recent call last)" in done.stderr + done.stdout:
        found.append(f"traceback: {_traceback(done.stderr)}")
    elif done.code not in (0, 1, 2):
        found.append(f"crashed: exit code {done.code}")
    elif done.code == 0:
        found += _accepted(case, done, place, sound)
    else:
        found += _refused(case, done)
    if done.memory > MEMORY:
        found.append(f"memory: {done.memory / 2**30:.1f} GiB")
    if done.left:
        found.append(f"processes: left {', '.join(done.left)}")
    return found + [f"files: {change}" for change in _changes(case, place, before)[:4]]


def _traceback(stderr: str) -> str:
    """Return the exception, and the last line of kdtrain's that it passed through."""
    last = [line.strip() for line in stderr.splitlines() if line.strip()][-1]
    places = re.findall(r'/(kdtrain/[\w/]+\.py)", line (\d+)', stderr)
    return f"{last[:200]} ({':'.join(places[-1]) if places else 'nowhere in kdtrain'})"


def _refused(case: Case, done: Done) -> list[str]:
    lines = done.stderr.splitlines()
    ours = [line for line in lines if line.startswith(_OURS)]
    foreign = [line for line in lines if not line.startswith(_OURS) and not _LOG.match(line)]
    found = []
    if foreign and "stderr" not in case.how:
        found.append(f"noise: {foreign[0][:200]!r}")
    if not ours and _found_damage(done):
        pass  # verify lists what is damaged on stdout
    elif len(ours) != 1 or lines[-1] != ours[0]:
        found.append(f"lines: {len(ours)} lines of kdtrain")
    else:
        line = ours[0]
        if len(line) > _LONGEST:
            found.append(f"lines: {len(line)} characters long")
        if any(ord(each) < 32 or 127 <= ord(each) < 160 for each in line):
            found.append(f"escapes: control characters in {line[:200]!r}")
        if "out of memory" in line or "annot allocate memory" in line:
            found.append(f"memory: ran into the limit: {line[:200]}")
        if not re.search(case.says, line):
            found.append(f"vague: nothing of {case.says!r} in {line[:200]!r}")
        if case.resealed and _DIGEST.search(line):
            found.append(f"harness: refused for its seal: {line[:200]}")
    if case.ends == "works":
        found.append(f"refused what is sound: {lines[-1][:200] if lines else 'without a word'}")
    return found


def _found_damage(done: Done) -> bool:
    if done.argv[0] != "verify" or done.code != 1:
        return False
    try:
        told = json.loads(done.stdout)
    except ValueError:
        return False
    return told.get("ok") is False and bool(told.get("problems"))


def _accepted(case: Case, done: Done, place: Place, sound: dict[str, Any]) -> list[str]:
    if case.ends == "refused":
        return [f"accepted: {done.stdout.strip()[:200]!r}"]
    foreign = [line for line in done.stderr.splitlines() if not _LOG.match(line)]
    if foreign and "stderr" not in case.how:
        return [f"noise: {foreign[0][:200]!r}"]
    if case.how.get("stdout") or 1 in case.how.get("closed", ()) or "--json" not in case.argv:
        return []
    try:
        told = json.loads(done.stdout, parse_constant=_no_constant)
    except ValueError as error:
        return [f"wrong: stdout is not a JSON object ({error})"]
    return _wrong_result(case, told, place, sound)


def _wrong_result(case: Case, told: dict[str, Any], place: Place, sound: dict[str, Any]) -> list[str]:
    command = case.argv[0]
    if command == "verify":
        return [] if told["ok"] is True else ["wrong: exit code 0 and not ok"]
    if command == "evaluate":
        expected = {name: value for name, value in sound["evaluate"].items() if name != "student"}
        if case.same and {name: value for name, value in told.items() if name != "student"} != expected:
            return ["wrong: other numbers than those of the sound cache"]
        return [] if _is_number(told["loss"]) or not case.finite else [f"wrong: the loss is {told['loss']}"]
    if command == "distill":
        loss = told["best_validation_loss"]
        return [] if _is_number(loss) or not case.finite else [f"wrong: the best validation loss is {loss}"]
    if command == "export":
        out = place.path(told["student"])
        lost = [name for name in ("config.json", "model.safetensors", "kdtrain.json") if not (out / name).is_file()]
        return [f"wrong: exported no {name}" for name in lost]
    if command == "cache-teacher" and case.same and told["digest"] != sound["cache"]["digest"]:
        return ["wrong: another digest than the sound cache's"]
    return []


def _no_constant(name: str) -> float:
    raise ValueError(f"it has {name}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _changes(case: Case, place: Place, before: Tree) -> list[str]:
    """List changes to files that are not the command's own."""
    after = tree(place.root)
    allowed = [os.path.normpath(f"here/{name}") for name in case.written]

    def own(name: str) -> bool:
        return any(name == each or name.startswith((f"{each}/", f"{each}.old-")) for each in allowed)

    found = []
    for name in sorted(before.keys() | after.keys()):
        if own(name) or before.get(name) == after.get(name):
            continue
        verb = "made" if name not in before else "removed" if name not in after else "changed"
        found.append(f"{verb} {name}")
    for path in place.planted:
        name = os.path.relpath(path, place.root)
        if own(name) and before[name] != after.get(name):
            found.append(f"{'removed' if name not in after else 'changed'} the user's {name}")
    if "--repair" in case.argv:
        kept = {facts[-1] for facts in after.values()}
        lost = [name for name, facts in before.items() if own(name) and facts[0][0] == "-" and facts[-1] not in kept]
        found += [f"lost the content of {name}" for name in lost]
    return found
