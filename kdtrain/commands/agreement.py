"""Whether all ranks are about to do the same, asked before the first step.

Each rank reads its own command line, installation, cache and models. On nodes where these differ, a file system that
lags behind say, ranks would train a mix of two runs to a good end. What they have is compared twice: options and code
as soon as the ranks are a group, because a rank with other options would take part in other exchanges, and the contents
of files once they are read. What only one rank needs, or what may differ between nodes, is left out (`OF_A_RANK`).

What it gives up: text is compared where it is packed (`cache.writer`), and the bytes of a shard where they are first
read; here the digest in the cache's manifest, over its tokens and shards, stands for them.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from kdtrain.config import CacheTeacherConfig, DistillConfig, sections
from kdtrain.errors import UsageError
from kdtrain.ranks import all_gather_object, process_group, raise_on_all_ranks, reported, world_size

OF_A_RANK = {"config", "json", "num_workers", "device_memory", "rank_timeout", "log_all_ranks"}
"""Options that may differ between ranks."""
_SHOWN = 3


@contextmanager
def same_ranks(config: CacheTeacherConfig | DistillConfig, device: torch.device) -> Iterator[None]:
    """`ranks`, which have the same options and the same code.

    Raises:
        UsageError: they have not, with what differs and on which rank.
    """
    with process_group(device, config.parallel.rank_timeout):
        agree(lambda: {**_options(config), **_code()})
        yield


def agree(own: Callable[[], Mapping[str, Any]]) -> None:
    """Refuse to go on where `own`, nested facts by name that JSON can hold, differ between ranks.

    Every rank must call it; `own` is not called in a process alone, and may take long.

    Raises:
        UsageError: on every rank, said by rank 0: what differs, and on which rank.
    """
    if world_size() == 1:
        return
    with raise_on_all_ranks():
        facts = dict(_leaves(own()))
    said = all_gather_object(facts)
    names = list(dict.fromkeys(name for each in said for name in each))
    found = [difference for name in names if (difference := _difference(name, [each.get(name) for each in said]))]
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise reported(
            UsageError(
                f"the ranks do not run the same: {'; '.join(found[:_SHOWN])}{more}; "
                "give all of them the same options, files and installation"
            )
        )


def weights_digest(model: torch.nn.Module) -> str:
    """A digest of a model's weights that costs one pass over the memory, to compare ranks by and nothing else.

    `models.loading.model_digest` takes seven times as long. Two numbers of a tensor that changed places go unnoticed.
    """
    tensors = model.state_dict().items()
    hashes = {name: int(torch.hash_tensor(each.detach()).view(torch.int64)) for name, each in tensors}
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()


def _options(config: CacheTeacherConfig | DistillConfig) -> dict[str, Any]:
    tables = sections(config).values()
    options = {name: value for table in tables for name, value in table.items() if name not in OF_A_RANK}
    return {f"--{name.replace('_', '-')}": value for name, value in options.items()}


def _code() -> dict[str, str]:
    """A digest of the source of kdtrain, and the versions of what computes."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
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


def _difference(name: str, values: list[Any]) -> str | None:
    """What is said of a fact by its values on all ranks; None where they are equal."""
    others = [number for number, value in enumerate(values) if value != values[0]]
    if not others:
        return None
    more = f" (and {len(others) - 1} other ranks differ)" if len(others) > 1 else ""
    return f"{name} is {_shown(values[0])} on rank 0 and {_shown(values[others[0]])} on rank {others[0]}{more}"


def _shown(value: Any) -> str:
    if value is None:
        return "not given"
    return value[:12] if isinstance(value, str) and len(value) == hashlib.sha256().digest_size * 2 else str(value)
