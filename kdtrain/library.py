"""What the library's face adds to the reader of caches: `Cache`, by address too, which verifies and aligns itself."""

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from kdtrain.cache.read import reader
from kdtrain.cache.read.reader import open_cache
from kdtrain.cache.tools.verify import verify_cache
from kdtrain.cache.write.sequences import CacheWriter
from kdtrain.config.commands import CacheTeacherConfig
from kdtrain.config.values import configured, refuse
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.tokenizers.view import ViewReader
from kdtrain.tokenizers.view_builder import build_view


class CacheSplit(reader.CacheReader):
    """A split of a `Cache`."""

    def aligned(
        self,
        tokenizer: Any,
        *,
        folder: Path | str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> ViewReader:
        """Return this split in the rows of a student with another tokenizer: a data set whose items any loop takes.

        The student needs it too, for what its tensors do not hold: `Student(model, loss, data=...)`.

        Args:
            tokenizer: the student's, or its folder or hub id.
            folder: where the rows are made and kept, of every split, and found again; by default a folder that goes
                with the process.
            special_tokens: see `kdtrain.Alignment`.

        UsageError: the tokenizers do not fit together, the folder holds something else, or the cache has no teacher's
            numbers.
        """
        given = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        kept = folder
        splits = None
        if kept is None:
            kept = tempfile.mkdtemp(prefix="kdtrain-")
            splits = (self.split,)
            atexit.register(shutil.rmtree, kept, ignore_errors=True)
        cache = reader.LocalCache(self.folder, self.manifest, self.remote)
        view = build_view(Path(kept), cache, given, events=special_tokens, splits=splits)
        return ViewReader(view, self.split)


class Cache(reader.LocalCache):
    """A finished cache: its splits as PyTorch data sets by name, and its manifest.

    Args:
        where: its folder, `hf:datasets/ORG/NAME[@REVISION]` or `https://...`. Of one that lies elsewhere a shard is
            fetched when it is first read, and stays: of the hub in HF_HOME, else in KDTRAIN_HOME or ~/.cache/kdtrain.

    Raises:
        UsageError: there is no finished cache, or it is not to be had.
        RunError: it cannot be reached.

    >>> cache = Cache("cache/t")
    >>> list(cache), len(cache["train"]), cache.temperature_range, cache.verify()
    (['train', 'validation'], 5, (0.6666666666666666, 4.0), [])
    >>> from torch.utils.data import DataLoader
    >>> from kdtrain import collate
    >>> loader = DataLoader(cache["train"], batch_size=2, collate_fn=collate)
    >>> next(iter(loader))["tokens"].shape
    torch.Size([2, 25])
    """

    split_type = CacheSplit

    def __init__(self, where: Path | str) -> None:
        found = open_cache(where)
        super().__init__(found.folder, found.manifest, found.remote)

    def __getitem__(self, split: str) -> CacheSplit:
        """Return the split `train` or `validation`. UsageError: see `CacheReader`."""
        return cast(CacheSplit, super().__getitem__(split))

    def verify(self) -> list[str]:
        """Read the whole cache and compare every digest; return one line for each problem."""
        return verify_cache(self.folder, cast(Any, self.remote))


CacheWriter.cache_type = Cache


def cache_teacher(config: CacheTeacherConfig | None = None, **options: Any) -> Cache:
    """Run a teacher over text and keep its distributions: `kdtrain cache-teacher` as a function.

    The same call again finishes what an interrupted one left. Every rank returns the finished cache. Arguments: as
    those of `kd.distill`.

    Raises:
        UsageError: teacher, data and folder do not fit together.
        RunError: the disk is full or cannot be written, or a rank was lost; published shards stay.
    """
    from kdtrain.commands.cache_teacher import build_among_ranks  # `Cache` alone must not wait for it

    config = configured(CacheTeacherConfig, config, options)
    refuse(config.dry_run, "dry_run is of the command: kdtrain cache-teacher ... --dry-run; leave it out")
    build_among_ranks(config, wait=True)
    return Cache(config.out)
