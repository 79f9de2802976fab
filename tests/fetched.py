"""What of a cache elsewhere is on this machine."""

from pathlib import Path

import torch


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards_here(home: Path) -> set[str]:
    return {path.stem for path in home.rglob("*.h5") if path.parent.name == "shards"}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
