"""The auxiliary loss of a mixture of experts: it keeps the router from sending all tokens to a few experts.

It is the model's own function of its router's logits, as `transformers` adds it to the loss of a forward with
`output_router_logits` (Switch Transformers, arXiv 2101.03961, eq. 4 to 6): number of experts x sum over experts of
(share of tokens routed to it) x (mean probability of it), over all layers; 1 or the experts of a token if balanced.
"""

import sys
from typing import Any

from torch import Tensor, nn

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""How configurations call the number of experts of a layer."""


def router_weight(model: nn.Module) -> float:
    """The weight of the auxiliary loss by the model's configuration; 0 for a dense model, or one without this loss."""
    whole = _whole(model)
    weight = getattr(whole.config.get_text_config(), "router_aux_loss_coef", None) or 0.0
    return float(weight) if _function(whole) is not None and experts_of(whole.config) is not None else 0.0


def router_loss(model: nn.Module, router_logits: tuple[Tensor, ...]) -> Tensor:
    """The auxiliary loss, a scalar, of the logits [B*T, experts] of the router of each layer."""
    whole = _whole(model)
    counts, function = experts_of(whole.config), _function(whole)
    assert counts is not None and function is not None
    loss: Tensor = function(router_logits, *counts)
    return loss


def experts_of(config: Any) -> tuple[int, int] | None:
    """The number of experts of a layer, and of those to which a token is routed; None for a dense model."""
    text = config.get_text_config()
    experts = next((n for name in EXPERTS if (n := getattr(text, name, None))), None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return (experts, chosen) if experts and chosen else None


def _whole(model: nn.Module) -> Any:
    return getattr(model, "get_base_model", lambda: model)()


def _function(whole: nn.Module) -> Any:
    return getattr(sys.modules[type(whole).__module__], "load_balancing_loss_func", None)
