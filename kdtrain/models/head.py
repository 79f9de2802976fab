"""A model in two pieces, backbone and output head, and the proof that the pieces equal the model.

The loss needs hidden states and the weight of the output head, not logits: a B x T x V tensor is the largest of a
training step, and the statistics engine never makes one. `split` finds the head of any `AutoModelForCausalLM`, tries
the few forms that heads have,

    logits = softcap(scale * (hidden @ weight^T + bias)),    softcap(z) = c * tanh(z / c),

and compares each with the model's own logits on a probe batch: once unchanged, and once with the output of the head's
linear layer amplified until a soft cap would bend it, because the logits of an untrained model are too small to show
one. If no form is proven, or an adapter on the head is trained, the model stays whole, `fused` is False and `reason`
names the cause.

Positions that restart at 0 and block-diagonal causal attention keep packed documents apart (`segments`); the probe
proves this too. A model on sdpa gets the attention function of `attention.py`, and so does one with soft-capped scores
where that has them; a model on another implementation gets the positions alone, from which transformers finds the
documents.

The auxiliary loss of a mixture of experts keeps the router from sending all tokens to a few experts. It is the model's
own function of its router's logits, as `transformers` adds it to the loss of a forward with `output_router_logits`
(Switch Transformers, arXiv 2101.03961, eq. 4 to 6): number of experts x sum over experts of (share of tokens routed to
it) x (mean probability of it), over all layers; 1 or the experts of a token if balanced.

Shape suffixes: B batch, T time, V vocabulary, D model width.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdtrain.config.sections import LoraConfig
from kdtrain.errors import UsageError
from kdtrain.models.attention import BLOCK, CAUSAL, document_positions, first_seen, fits_causal, seen_windows
from kdtrain.models.output_head import HeadPart

# Largest |difference| / largest |value|: the head is one product, computed twice in the same dtype.
_HEAD_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
_AMPLIFIED_LOGIT = 40.0
FAILURES = (TypeError, ValueError, AttributeError, KeyError, IndexError, RuntimeError)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""How configurations call the number of experts of a layer."""


class SplitModel(nn.Module):
    """A causal language model as backbone and output head.

    `model` is the only submodule, so that the keys of the state dict are `model.` and the names of transformers.
    `fused`: whether the head is split off; `reason`: why not. `separates_documents`: whether `segments` work. `frozen`:
    entries of the state dict that are not trained, where that is a part of it; `base`: the digest of these as they were
    loaded; `lora`: the adapters, if there are any. `keeps_keys`: whether its steps with a KV cache give the logits of
    whole forwards; None: `generate.decoding` has not tried yet. `tensor`: the mesh of the ranks that compute a forward
    together (`parallel.tensor`), each with a part of the head; `once`: names of parameters that each of these holds
    whole, and whether their gradient is the sum over these ranks.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.fused = False
        self.reason = ""
        self.separates_documents = False
        self.frozen: frozenset[str] = frozenset()
        self.base = ""
        self.lora: LoraConfig | None = None
        self.keeps_keys: bool | None = None
        self.tensor: Any = None
        self.once: dict[str, bool] = {}
        self._scale = 1.0
        self._softcap: float | None = None

    @property
    def head(self) -> HeadPart:
        """The output head, with the live parameters; the identity if the model is not split."""
        if not self.fused:
            return HeadPart()
        linear = self.model.get_output_embeddings()
        head = HeadPart(linear.weight, getattr(linear, "bias", None), self._scale, self._softcap)
        if self.tensor is None:
            return head
        rows = -(-self.vocab_size // self.tensor.size())  # as `torch.chunk` cuts
        first = self.tensor.get_local_rank() * rows
        return replace(head, first=first, size=self.vocab_size, group=self.tensor.get_group())

    @property
    def vocab_size(self) -> int:
        """Rows of the output head, padding included."""
        return int(self.model.get_output_embeddings().weight.shape[0])

    def forward(
        self,
        tokens_BT: Tensor,
        segments_BT: Tensor | None = None,
        layers: tuple[int, ...] = (),
        balance: bool = False,
        past: Any = None,
    ) -> Any:
        """Return hidden states [B, T, D], or logits [B, T, V] if the model is not split.

        tokens_BT: token ids, int64. segments_BT: number of the document of each position, integers; attention and
        positions then stay within a document. None: plain causal attention. layers: also return a list of the outputs
        [B, T, D] of these, where 0 is the embedding and the last one normed. balance: and the router's loss, a scalar,
        behind them (`router_loss`). past: a cache of transformers with the keys of the tokens before these, which takes
        theirs.
        """
        if segments_BT is not None and not self.separates_documents:
            raise UsageError(f"{_name(self.model)} cannot keep documents apart; use --no-document-mask")
        more = {"output_hidden_states": True} if layers else {}
        more |= {"output_router_logits": True} if balance else {}
        more |= {} if past is None else {"past_key_values": past, "use_cache": True}
        output = self._output(tokens_BT, segments_BT, **more)
        # prompt tuning puts positions in front
        result = output.last_hidden_state if self.fused else output.logits[:, -tokens_BT.shape[1] :]
        if not (layers or balance):
            return result
        states = [output.hidden_states[layer] for layer in layers]
        return result, states + ([router_loss(self.model, output.router_logits)] if balance else [])

    def logits(self, tokens_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V]."""
        return self.head(self(tokens_BT, segments_BT))

    def _output(self, tokens_BT: Tensor, segments_BT: Tensor | None, **more: Any) -> Any:
        documents = {}
        if segments_BT is not None:
            documents["position_ids"] = document_positions(segments_BT)
            if self.model.config._attn_implementation == CAUSAL:
                documents["attention_mask"] = first_seen(segments_BT)
        model: Any = self.model
        if self.fused:
            # the adapters of peft are inside the layers of the model that it wraps; the probe proves it
            model = _base(model).base_model
        return model(input_ids=tokens_BT, **{"use_cache": False, **documents, **more})


def split(model: PreTrainedModel, probe_tokens_BT: Tensor | None = None, *, keep_attention: bool = False) -> SplitModel:
    """Split a model into backbone and output head, proven equal on a probe batch.

    probe_tokens_BT: token ids, int64 [B, T >= 4]; by default `default_probe`. The model keeps its mode; its attention
    implementation changes from sdpa to `CAUSAL` if that is proven equal, unless `keep_attention`, and `state_ties`
    corrects its configuration. Raises `UsageError` for a model that looks at later tokens (an encoder), and for a model
    whose configured shapes do not fit together.
    """
    tokens_BT = default_probe(model) if probe_tokens_BT is None else probe_tokens_BT
    state_ties(model)
    pieces = SplitModel(model)
    with evaluating(model), torch.no_grad(), torch.autocast(tokens_BT.device.type, enabled=False):
        try:
            probe = _Probe(pieces, tokens_BT)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            cause = " ".join(str(error).split())[:200]
            raise UsageError(f"{_name(model)} cannot be run as it is configured: {cause}") from error
        if probe.effect(of=slice(probe.cut, None), on=slice(None, probe.cut)) > probe.bound:
            raise UsageError(f"{_name(model)} looks at later tokens; take a causal language model")
        if not keep_attention:
            probe.use_causal_attention()
        pieces.separates_documents = True  # for the probe
        pieces.separates_documents = probe.documents_are_separate()
        _fuse(pieces, tokens_BT)
    return pieces


def state_ties(model: Any) -> None:
    """Correct a configuration that calls the output head tied where it has weights of its own.

    transformers loads such a head as it is, and ties it in what it makes or loads by that configuration later.
    """
    ends = [getattr(get(), "weight", None) for get in (model.get_output_embeddings, model.get_input_embeddings)]
    if isinstance(model, PreTrainedModel) and None not in ends and ends[0] is not ends[1]:
        for config in (model.config, model.config.get_text_config()):
            if getattr(config, "tie_word_embeddings", False):
                config.tie_word_embeddings = False


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the transformer layers of a model: the members of its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda modules: len(modules), default=[]))


def layer_widths(pieces: SplitModel) -> list[int]:
    """Return the width of the embedding and of each layer's output, found by a probe batch.

    Raises `UsageError` for a model that does not return them.
    """
    with evaluating(pieces.model), torch.no_grad(), torch.autocast(pieces.model.device.type, enabled=False):
        output = pieces._output(default_probe(pieces.model), None, output_hidden_states=True)
    states = getattr(output, "hidden_states", None)
    if not states or any(each is None or each.ndim != 3 for each in states):
        raise UsageError(f"{_name(pieces.model)} does not return the outputs of its layers; leave --hidden-loss out")
    return [each.shape[-1] for each in states]


def default_probe(model: PreTrainedModel) -> Tensor:
    """Return 2 x 16 token ids, drawn from the model's vocabulary with a fixed seed.

    On a GPU rows are longer, if the model has the positions: only there `causal_attention` takes FlexAttention.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 16
    length = min(2 * BLOCK + 16, positions) if model.device.type == "cuda" else 16
    tokens_BT = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    return tokens_BT.to(model.device)


class _Probe:
    """The logits of a probe batch in two halves, and a bound on their rounding.

    Rounding depends on the shapes and the dtype, so the bound is measured: a tenth of the change in the second half's
    logits when the tokens of the first half change.
    """

    def __init__(self, pieces: SplitModel, tokens_BT: Tensor) -> None:
        self.pieces = pieces
        self.tokens_BT = tokens_BT
        self.cut = tokens_BT.shape[1] // 2
        self.logits_BTV = pieces(tokens_BT)
        effect = self.effect(of=slice(None, self.cut), on=slice(self.cut, None))
        self.bound = max(effect / 10, 1e-5 * _largest(self.logits_BTV))

    def effect(self, of: slice, on: slice) -> float:
        others_BT = self.tokens_BT.clone()
        others_BT[:, of] = (others_BT[:, of] + 1) % self.pieces.model.config.get_text_config().vocab_size
        return _largest((self.pieces(others_BT) - self.logits_BTV)[:, on])

    def use_causal_attention(self) -> None:
        """Use `CAUSAL` if it supports all layers and the logits stay equal."""
        model = self.pieces.model
        config = self.pieces.model.config.get_text_config()
        before = config._attn_implementation
        if not fits_causal(config):
            return
        model.set_attn_implementation(CAUSAL)
        seen_windows.clear()
        equal = self._gives(self.logits_BTV, None)
        window = _window(config)
        # some models pass their window in the mask only, which `causal_attention` does not get
        if not equal or (window is not None and window not in seen_windows):
            model.set_attn_implementation(before)

    def documents_are_separate(self) -> bool:
        if getattr(self.pieces.model, "_is_stateful", False):
            return False
        halves = self.tokens_BT[:, : self.cut], self.tokens_BT[:, self.cut :]
        apart_BTV = torch.cat([self.pieces(half) for half in halves], dim=1)
        second_T = torch.arange(self.tokens_BT.shape[1], device=self.tokens_BT.device) >= self.cut
        return self._gives(apart_BTV, second_T.long().expand_as(self.tokens_BT))

    def _gives(self, expected_BTV: Tensor, segments_BT: Tensor | None) -> bool:
        try:
            return _largest(self.pieces(self.tokens_BT, segments_BT) - expected_BTV) <= self.bound
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return False


def _window(config: Any) -> int | None:
    """Return the sliding window of a model's configuration; None if there is none or it is unused."""
    used = getattr(config, "use_sliding_window", True)
    types = getattr(config, "layer_types", None)
    if not used or (types is not None and "sliding_attention" not in types):
        return None
    return getattr(config, "sliding_window", None)


def _fuse(pieces: SplitModel, tokens_BT: Tensor) -> None:
    """Split the head off if a form is proven, else set the reason."""
    pieces.reason = f"no known form of output head gives the logits of {_name(pieces.model)}"
    try:
        pieces.fused = _prove_a_form(pieces, tokens_BT)
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:
        pieces.fused = False
        pieces.reason = " ".join(f"{_name(pieces.model)}: {type(error).__name__}: {error}".split())[:200]
    pieces.reason = "" if pieces.fused else pieces.reason


def _prove_a_form(pieces: SplitModel, tokens_BT: Tensor) -> bool:
    """Set the first form that gives the probe's logits, plain and amplified; try the configuration's own first."""
    linear = pieces.model.get_output_embeddings()
    if pieces.model.base_model is pieces.model or getattr(linear, "weight", None) is None:
        return False
    if _trains_more(linear, pieces.model.get_input_embeddings()):
        pieces.reason = f"an adapter on the output head of {_name(pieces.model)}, or on what is tied to it, is trained"
        return False
    logits_BTV = pieces(tokens_BT)
    gain = _AMPLIFIED_LOGIT / max(_largest(logits_BTV), 1e-6)
    with linear.register_forward_hook(lambda module, inputs, product: product * gain):
        amplified_BTV = pieces(tokens_BT)
    pieces.fused = True
    product_BTV = HeadPart(linear.weight, getattr(linear, "bias", None))(pieces(tokens_BT))
    tolerance = _HEAD_TOLERANCE[linear.weight.dtype]
    for scale, softcap in _forms(pieces.model):
        form = HeadPart(scale=scale, softcap=softcap)
        pairs = ((form.shape(product_BTV.clone()), logits_BTV), (form.shape(gain * product_BTV), amplified_BTV))
        if all(
            values.shape == expected.shape and _largest(values - expected) <= tolerance * _largest(expected)
            for values, expected in pairs
        ):
            pieces._scale, pieces._softcap = scale, softcap
            return True
    return False


def _trains_more(head: Any, embedding: Any) -> bool:
    """Return whether head or tied embedding train more than a weight and a bias: no probe sees a fresh adapter."""
    own = {id(each) for each in head.parameters()}
    modules = [head, embedding] if any(id(each) in own for each in embedding.parameters()) else [head]
    known = {id(getattr(each, name, None)) for each in modules for name in ("weight", "bias")}
    return any(each.requires_grad and id(each) not in known for module in modules for each in module.parameters())


def _forms(model: PreTrainedModel) -> Iterator[tuple[float, float | None]]:
    config = model.config.get_text_config()
    softcaps = [getattr(config, "final_logit_softcapping", None), None]
    scales = [getattr(config, "logit_scale", None), 1.0]
    if divisor := getattr(config, "logits_scaling", None):
        scales.insert(0, 1.0 / divisor)
    for softcap in dict.fromkeys(softcaps):
        for scale in dict.fromkeys(scales):
            if isinstance(scale, float | int):
                yield float(scale), softcap


def _largest(tensor: Tensor) -> float:
    return tensor.float().abs().max().item()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Keep a model in evaluation mode in the block; then each of its modules has its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _name(model: nn.Module) -> str:
    return type(model).__name__


def router_weight(model: nn.Module) -> float:
    """Return the weight of the auxiliary loss by the model's configuration; 0 for a model without this loss."""
    whole = _base(model)
    weight = getattr(whole.config.get_text_config(), "router_aux_loss_coef", None) or 0.0
    return float(weight) if _balancing(whole) is not None and experts_of(whole.config) is not None else 0.0


def router_loss(model: nn.Module, router_logits: tuple[Tensor, ...]) -> Tensor:
    """Compute the auxiliary loss, a scalar, of the logits [B*T, experts] of the router of each layer."""
    whole = _base(model)
    counts = experts_of(whole.config)
    function = _balancing(whole)
    assert counts is not None and function is not None
    loss: Tensor = function(router_logits, *counts)
    return loss


def experts_of(config: Any) -> tuple[int, int] | None:
    """Return how many experts a layer has, and to how many of them it routes a token; None for a dense model."""
    text = config.get_text_config()
    # a name that is bound within the loop would break the graph of torch 2.11
    experts = next(filter(None, (getattr(text, name, None) for name in EXPERTS)), None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return (experts, chosen) if experts and chosen else None


def _base(model: nn.Module) -> Any:
    return getattr(model, "get_base_model", lambda: model)()


def _balancing(whole: nn.Module) -> Any:
    return getattr(sys.modules[type(whole).__module__], "load_balancing_loss_func", None)
