"""`--collect-tensors`: statistics of a run's operands, for research into number formats (docs/precision.md)."""

from dataclasses import dataclass
from typing import Any

from kdtrain.config.choices import register_observer
from kdtrain.config.values import Options, option, register_section
from kdtrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CollectConfig(Options):
    """Statistics of the operands of linear layers."""

    collect_tensors: str | None = option(None, free=True, formerly="precision")
    """Write statistics of the linear layers whose names match this pattern, such as '*.mlp.*', to tensors.h5."""
    collect_every: int = option(100, free=True, least=1, formerly="precision")
    """Steps between two collections."""
    collect_raw: bool = option(False, free=True, needs="collect_tensors", formerly="precision")
    """With --collect-tensors: store the numbers too, at most 65,536 of a tensor, until the file has 512 MiB."""


register_section("collect", {"distill": CollectConfig})


@register_observer("collect")
def observer(request: Any) -> Any:
    """Return the collector of a run, or None without --collect-tensors. UsageError: the run has --tensor-parallel."""
    options = request.config.plugins["collect"]
    if options.collect_tensors is None:
        return None
    if request.config.parallel.tensor_parallel > 1:
        raise UsageError("--collect-tensors reads whole layers, and --tensor-parallel cuts them; use --parallel fsdp")
    from kdtrain.plugins.collect.collector import Collector

    return Collector(request.config.out / "tensors.h5", options, request)
