"""What of a cache elsewhere is on this machine."""

from pathlib import Path

import torch

from kdtrain.cache.read import local_store
from kdtrain.library import Cache
from tests.web import Web


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shards_here(home: Path) -> set[str]:
    return {path.stem for path in home.rglob("*.h5") if path.parent.name == "shards"}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def room_for(web: Web, home: Path, shards: float) -> float:
    """The limit in GB at which so many of the largest shards fit beside the small files."""
    manifest = Cache(web.url).manifest
    Cache(web.url).remote.bring_tokenizer()  # type: ignore[union-attr]
    rest = sum(each.lstat().st_size for each in home.rglob("*") if each.is_file())
    return (rest + 2000 + shards * max(local_store.sizes(manifest).values())) / local_store.GB
