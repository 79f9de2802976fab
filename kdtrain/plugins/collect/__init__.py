"""`--collect-tensors`: statistics of a run's operands, for research into number formats (docs/precision.md)."""

from typing import Any

from kdtrain.config.registered import register_observer, register_section
from kdtrain.errors import UsageError
from kdtrain.plugins.collect.options import CollectConfig

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
