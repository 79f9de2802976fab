"""Files that are complete or absent: publishing by rename, sealed JSON, digests.

A file is written under its name + ".tmp", flushed to the disk, renamed, and the folder is flushed after it:
whoever sees the name sees the whole content, also after a power cut. A JSON record carries a SHA-256 over
the rest of itself (`digest`), so that an edited or damaged one is noticed. What this gives up: two flushes
a file, a few milliseconds.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kdtrain import faults
from kdtrain.errors import writing

PUBLISH_POINTS = ("before-fsync", "before-rename", "before-folder-fsync", "after-publish")
"""The fault points of one `published` file, in order; the full name is LABEL.POINT."""


def canonical_json(value: Any) -> str:
    """One spelling for equal values: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def json_digest(value: Any) -> str:
    """SHA-256 (hex) over the canonical spelling of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """`record` with `digest`, the SHA-256 over everything else in it."""
    content = {key: value for key, value in record.items() if key != "digest"}
    return {**content, "digest": json_digest(content)}


def read_sealed(path: Path) -> dict[str, Any]:
    """The record in `path`. ValueError: not JSON, or its seal does not match; OSError: no such file."""
    text = path.read_text(encoding="utf-8")
    record = json.loads(text)
    # The text is compared too: two spellings of a number can be one value, and a flipped bit is to be seen.
    if not isinstance(record, dict) or sealed(record) != record or _spelled(record) != text:
        raise ValueError("its content does not match its own digest")
    return record


def _spelled(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1, allow_nan=False) + "\n"


def file_digest(path: Path) -> str:
    """SHA-256 (hex) over the bytes of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def published(path: Path, label: str) -> Iterator[Path]:
    """Yield the name to write to; afterwards `path` is complete on the disk. On any error nothing is left
    behind.

    RunError: the disk is full, the folder is read-only, ...; the file that stood at `path` before is
    untouched.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with writing(path):
            yield temporary
            faults.point(f"{label}.before-fsync")
            fsync(temporary)
            faults.point(f"{label}.before-rename")
            os.replace(temporary, path)
            faults.point(f"{label}.before-folder-fsync")
            fsync(path.parent)
            faults.point(f"{label}.after-publish")
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def publish_json(path: Path, record: dict[str, Any], label: str) -> dict[str, Any]:
    """Seal `record`, write it to `path`, and give back the sealed record."""
    record = sealed(record)
    with published(path, label) as temporary:
        temporary.write_text(_spelled(record), encoding="utf-8")
    return record
