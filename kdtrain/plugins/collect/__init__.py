"""`--collect-tensors`: statistics of a run's operands, for research into number formats (docs/precision.md)."""

from dataclasses import dataclass
from typing import Any

from kdtrain.config.registered import register_observer, register_section
from kdtrain.config.values import Options, option


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
    """Collects from a run with --collect-tensors."""
    options = request.config.plugins["collect"]
    if options.collect_tensors is None:
        return None
    from kdtrain.plugins.collect.collector import Collector

    return Collector(request.config.out / "tensors.h5", options, request)
