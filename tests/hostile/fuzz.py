"""Bytes that chance has changed, in files that are sealed again: whoever reads them has to end, in one line or well."""

from collections.abc import Callable

from tests.hostile import seal
from tests.hostile.case import COMMANDS, Cases, Place, curried

_NEWEST = "run/checkpoints/step-00000004"


def cases() -> Cases:
    """Shards most of all: their format is read by a library in C."""
    found = Cases("bytes")
    for number in range(60):
        command = ("evaluate", "distill", "verify")[number % 3]
        found.add(f"shard {number}", command, _shard(number), ends="either", says="cache")
    for number in range(12):
        found.add(
            f"manifest {number}",
            ("verify", "distill")[number % 2],
            _file("cache/manifest.json", number),
            resealed=False,
            ends="either",
        )
        attack = _checkpoint(f"{_NEWEST}/shard-00001-00001.safetensors", number)
        found.add(f"checkpoint's tensors {number}", ("export", "resume")[number % 2], attack, ends="either")
        found.add(
            f"checkpoint's state {number}",
            ("export", "resume")[number % 2],
            _checkpoint(f"{_NEWEST}/state.json", number),
            ends="either",
        )
        found.add(f"weights {number}", "model", _file("model/model.safetensors", number), ends="either")
        found.add(f"tokenizer {number}", "build", _file("teacher/tokenizer.json", number), ends="either")
    for number in range(6):
        found.add(f"config.json {number}", "model", _file("model/config.json", number), ends="either")
        found.add(f"student.toml {number}", "distill", _file("student.toml", number), ends="either")
        found.add(f"run's config.toml {number}", "resume", _file("run/config.toml", number), ends="either")
        found.add(f"text {number}", "build", _file("corpus/a.txt", number), ends="either")
        found.add(f"log-probabilities {number}", "logprobs", _file("logprobs.jsonl", number), ends="either")
        found.add(f"parquet {number}", _parquet_command(), _parquet(number), ends="either")
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
    """Most of the structure of a shard stands in its first and last kilobytes."""
    for name in ("train-00000", "validation-00000"):
        size = place.path(f"cache/shards/{name}.h5").stat().st_size
        part = ((0, 512), (0, 8192), (size - 16_384, size), (0, size))[number % 4 if number < 48 else 1]
        _spoil(place, f"cache/shards/{name}.h5", number, max(0, part[0]), part[1])
    seal.cache(place.path("cache"))


def _file(name: str, number: int) -> Callable[[Place], None]:
    return lambda place: _spoil(place, name, number, 0, 8192)


@curried
def _checkpoint(place: Place, name: str, number: int) -> None:
    _spoil(place, name, number, 0, 8192)
    place.seal_run()


def _parquet_command() -> tuple[str, ...]:
    return ("cache-teacher", "--teacher", "teacher", "--data", "data.parquet", *COMMANDS["build"][5:])


@curried
def _parquet(place: Place, number: int) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": ["some text " * 40] * 60})
    parquet.write_table(table, place.path("data.parquet"))
    _spoil(place, "data.parquet", number)
