"""Compiles a model layer by layer, with `torch.compile`.

Layers of one kind share one graph, which takes seconds to compile and stays whole under DDP and FSDP2. A layer is
compiled after FSDP2 has sharded it and transformers recomputes its activations, because both act through the class of
the layer, and the compiler reads the forward once. `plain` swaps the layers' own forwards in: what runs once (a
validation, a sample of text, a pass with hooks) then compiles nothing, while FlexAttention still compiles its kernel.

What it gives up: embedding and last norm are not compiled, and a mask for documents is made in each layer.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from transformers.utils.output_capturing import _active_collector

from kdtrain.models.head import layers_of

GRAPHS = 64
"""Graphs of one layer's code: of each kind of layer, position of the switch, size of a batch, and model. Beyond the
compiler's own limit of 8 it would run layers without a graph, and log that once."""

COLLECTS_ONCE: dict[str, Any] = {"skip_fwd_side_effects_in_bwd_under_checkpoint": True}
"""A backward that computes activations again does not collect again; the compiler would make no graph otherwise."""


def compiled_whole(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `function`, which calls the model, compiled as one graph."""
    return dynamo_config.patch(COLLECTS_ONCE)(torch.compile(function, dynamic=False, **options))


class CompiledLayers:
    """The layers of a model, each with a compiled forward from now on.

    Args:
        model: as it trains, sharded and with activation checkpointing where it has them.
        options: of `torch.compile`.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self._plain = {layer: layer.forward for layer in layers_of(model)}
        self._compiled = {layer: _collecting(each, options) for layer, each in self._plain.items()}
        self._use(self._compiled)

    @staticmethod
    def calling(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, which calls the model, with the compiler's settings for layers in its thread."""
        # A layer has no need of DDPOptimizer, which would cut its graph at weights as large as a bucket.
        return dynamo_config.patch(optimize_ddp=False, recompile_limit=GRAPHS, **COLLECTS_ONCE)(function)

    @contextlib.contextmanager
    def plain(self) -> Iterator[None]:
        """Run the layers without their graphs in the block."""
        self._use(self._plain)
        try:
            yield
        finally:
            self._use(self._compiled)

    @staticmethod
    def _use(forwards: dict[nn.Module, Callable[..., Any]]) -> None:
        for layer, forward in forwards.items():
            layer.forward = forward


def _collecting(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """Compile a layer's forward; its router logits go to the collector around it, which no graph can read."""

    def inside(routes: bool, *args: Any, **kwargs: Any) -> Any:
        found: dict[str, list[Any]] = {"router_logits": []} if routes else {}
        token = _active_collector.set(found)
        output = forward(*args, **kwargs)
        _active_collector.reset(token)
        return output, found

    compiled = torch.compile(inside, dynamic=False, **options)

    def run(*args: Any, **kwargs: Any) -> Any:
        around = _active_collector.get() or {}
        try:
            output, found = compiled("router_logits" in around, *args, **kwargs)
        except BaseException:
            _active_collector.reset(None)  # what a part of a graph has set
            raise
        for key, values in found.items():
            around[key].extend(values)
        return output

    return run
