"""Bytes that chance has changed, in files that are sealed again: whoever reads them has to end, in one line or well."""

from collections.abc import Callable
from typing import Any

from tests.hostile import seal
from tests.hostile.case import COMMANDS, Attack, Cases, Place, curried

_NEWEST = "run/checkpoints/step-00000004"


def cases() -> Cases:
    """List cases of changed bytes, of shards most of all: their format is read by a library in C."""
    found = Cases("bytes", ends="either")
    for number in range(60):
        command = ("evaluate", "distill", "verify")[number % 3]
        found.add(f"shard {number}", command, _shard(number), says="cache")
    parquet = ("cache-teacher", "--teacher", "teacher", "--data", "data.parquet", *COMMANDS["build"][5:])
    rows: list[tuple[str, int, tuple[Any, ...], Callable[[int], Attack]]] = [
        ("manifest", 12, ("verify", "distill"), _file("cache/manifest.json")),
        ("checkpoint's tensors", 12, ("export", "resume"), _file(f"{_NEWEST}/shard-00001-00001.safetensors")),
        ("checkpoint's state", 12, ("export", "resume"), _file(f"{_NEWEST}/state.json")),
        ("weights", 12, ("model",), _file("model/model.safetensors")),
        ("tokenizer", 12, ("build",), _file("teacher/tokenizer.json")),
        ("config.json", 6, ("model",), _file("model/config.json")),
        ("student.toml", 6, ("distill",), _file("student.toml")),
        ("run's config.toml", 6, ("resume",), _file("run/config.toml")),
        ("text", 6, ("build",), _file("corpus/a.txt")),
        ("log-probabilities", 6, ("logprobs",), _file("logprobs.jsonl")),
        ("parquet", 6, (parquet,), _parquet),
    ]
    for name, times, commands, attack in rows:
        for number in range(times):
            command = commands[number % len(commands)]
            found.add(f"{name} {number}", command, attack(number), resealed=name != "manifest")
    return found


def _spoil(place: Place, name: str, number: int, first: int = 0, last: int | None = None) -> None:
    """Change bytes between two places: some turned, a piece moved, filled or cut out."""
    path, choose = place.path(name), place.random
    content = bytearray(path.read_bytes())
    end = len(content) if last is None else min(last, len(content))
    for _ in range(1 + number % 8):
        content[choose.randrange(first, end)] = choose.randrange(256)
    if number % 4 == 1:
        start, size = choose.randrange(first, end), choose.randrange(1, 64)
        content[start : start + size] = bytes([choose.choice((0, 255, 127))]) * size
    if number % 4 == 2:
        start, source = choose.randrange(first, end), choose.randrange(first, end)
        content[start : start + 32] = content[source : source + 32]
    if number % 4 == 3:
        del content[choose.randrange(first + 1, end) :]
    path.write_bytes(content)


@curried
def _shard(place: Place, number: int) -> None:
    """Spoil bytes of a shard, most often its first and last kilobytes, where most of its structure stands."""
    for name in ("train-00000", "validation-00000"):
        size = place.path(f"cache/shards/{name}.h5").stat().st_size
        part = ((0, 512), (0, 8192), (size - 16_384, size), (0, size))[number % 4 if number < 48 else 1]
        _spoil(place, f"cache/shards/{name}.h5", number, max(0, part[0]), part[1])
    seal.cache(place.path("cache"))


def _file(name: str) -> Callable[[int], Attack]:
    def attack(place: Place, number: int) -> None:
        _spoil(place, name, number, 0, 8192)
        if name.startswith(_NEWEST):
            place.seal_run()

    return curried(attack)


@curried
def _parquet(place: Place, number: int) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": ["some text " * 40] * 60})
    parquet.write_table(table, place.path("data.parquet"))
    _spoil(place, "data.parquet", number)
