"""Checks before the first step that all ranks run the same job.

Each rank reads its own command line, installation, cache and models. On nodes where these differ, for example because a
file system lags behind, the ranks would train a mix of two runs without an error. The ranks compare twice: options and
code as soon as they form a group, because a rank with other options would run other collectives, and the contents of
files once they are read. Options that one rank alone needs, or that may differ between nodes (`per_rank`), are left
out.

What it gives up: `cache.writer` compares text when it packs it, and the reader compares the bytes of a shard when it
first reads it; here the digest in the cache's manifest, over its tokens and shards, stands for them.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from kdtrain.config.choices import BACKENDS, DIVERGENCES, OPTIMIZERS, SOURCES, TAILS, TEACHERS, TEMPERATURES, TEXTS
from kdtrain.config.commands import CacheTeacherConfig, DistillConfig
from kdtrain.config.values import flag, marked, sections
from kdtrain.errors import UsageError
from kdtrain.ranks import all_gather_object, process_group, raise_on_all_ranks, reported, world_size

_SHOWN = 3


@contextmanager
def same_ranks(config: CacheTeacherConfig | DistillConfig, device: torch.device) -> Iterator[None]:
    """Make the ranks a process group in the block, after a check that all have the same options and code.

    UsageError: they differ; the message names what differs and on which rank.
    """
    per_rank = marked(type(config), "per_rank")
    options = {
        flag(name): value
        for table in sections(config).values()
        for name, value in table.items()
        if name not in per_rank
    }
    with process_group(device, config.parallel.rank_timeout):
        agree(lambda: options | code())
        yield


def agree(metadata: Callable[[], Mapping[str, Any]]) -> None:
    """Refuse a job whose `metadata`, nested values by name that JSON can hold, differs between ranks.

    Every rank must call it. `metadata` may be slow; a single process does not call it.

    UsageError: on every rank, reported by rank 0: what differs, and on which rank.
    """
    if world_size() == 1:
        return
    with raise_on_all_ranks():
        own = dict(_leaves(metadata()))
    of_ranks = all_gather_object(own)
    differences = []
    for name in dict.fromkeys(name for each in of_ranks for name in each):
        values = [each.get(name) for each in of_ranks]
        others = [number for number, value in enumerate(values) if value != values[0]]
        if others:
            more = f" (and {len(others) - 1} other ranks differ)" if len(others) > 1 else ""
            other = f"{_shown(values[others[0]])} on rank {others[0]}{more}"
            differences.append(f"{name} is {_shown(values[0])} on rank 0 and {other}")
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise reported(
            UsageError(
                f"the ranks do not run the same: {'; '.join(differences[:_SHOWN])}{more}; "
                "give all of them the same options, files and installation"
            )
        )


def weights_digest(model: torch.nn.Module) -> str:
    """Compute a digest of a model's weights in one pass over the memory, used only to compare ranks.

    `models.loading.model_digest` takes seven times as long. The digest misses two numbers of a tensor that are swapped.
    """
    tensors = model.state_dict().items()
    hashes = {name: int(torch.hash_tensor(each.detach()).view(torch.int64)) for name, each in tensors}
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()


def code() -> dict[str, str]:
    """Return a digest of the source of kdtrain and of the packages' modules in use, and the versions of libraries."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    for registry in (DIVERGENCES, TAILS, TEMPERATURES, OPTIMIZERS, BACKENDS, SOURCES, TEXTS, TEACHERS):
        for name, module in sorted(registry.modules.items()):  # a package's own, of those that are loaded
            if name not in registry.builtin and (source := getattr(sys.modules.get(module), "__file__", None)):
                digest.update(f"{registry.option} {name}\n".encode() + Path(source).read_bytes())
    return {
        "the code of kdtrain": digest.hexdigest(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{name}.{key}" if name else key)


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    return value[:12] if isinstance(value, str) and len(value) == hashlib.sha256().digest_size * 2 else str(value)
