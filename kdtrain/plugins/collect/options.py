"""Options of `--collect-tensors`."""

from dataclasses import dataclass

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
