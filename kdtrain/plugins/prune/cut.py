"""Pruning: a smaller model of what matters most in a larger one, after Minitron (arXiv 2407.14679, section 2).

Attention heads and MLP neurons are chosen in each layer, embedding channels once for the whole model, by importance
scores (`scores`); layers by the loss without each. Under grouped queries whole groups go, and where the
shape has fewer queries a key, the least important query heads of each group that stays. What stays keeps its order.

A norm over fewer channels divides by another root mean square. Its weight is therefore multiplied by sqrt(s D / W): D
channels become W, which hold the share s of the mean square in front of that norm, measured with the scores; and what
it adds to that mean square, its eps, by D / W, the best one number for all norms; queries and keys that have norms with
this eps grow as much. Channels that are always zero so change nothing but rounding, except where a norm also subtracts
the mean over the channels (GPT-2), which fewer do not have. The paper, which trains for billions of tokens afterwards,
has neither.

What a model has where stands in `ROLES`, by model type; sizes may only shrink, and everything else, head_dim and
vocabulary included, stays the teacher's.

Shape suffixes: L layers, H query heads, I neurons of a layer's MLP, W channels that stay.
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kdtrain.errors import UsageError
from kdtrain.models.loading import configuration, new_model, plain_config
from kdtrain.models.spec import ModelSpec

_FREE = re.compile("(?:dropout|pdrop)(?:_prob|_rate|_p)?|initializer_range|use_cache")
"""Keys of a [config] that a pruned model takes from its shape, because they are no part of the forward."""


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of the modules of a model type, by their names in the model, or in a layer."""

    layers: str = "model.layers"
    embeddings: tuple[str, ...] = ("model.embed_tokens",)
    """Their columns are channels; the first is that of the tokens."""
    head: str = "lm_head"
    last_norm: str = "model.norm"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Of a layer: in front of its attention and of its MLP."""
    post_norms: tuple[str, ...] = ()
    """Of a layer: over the channels that its attention and its MLP add."""
    reads: Mapping[str, str] = field(
        default_factory=lambda: {
            **{f"self_attn.{name}_proj": "heads" if name == "q" else "groups" for name in "qkv"},
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "neurons"),
        }
    )
    """Linear maps of a layer from the channels -> to what."""
    writes: Mapping[str, str] = field(default_factory=lambda: {"self_attn.o_proj": "heads", "mlp.down_proj": "neurons"})
    """Linear maps of a layer to the channels -> from what; attention first."""
    uncut: tuple[str, ...] = ()
    """Modules of a layer that have none of these axes."""
    inputs_first: bool = False
    """A linear map's weight is [inputs, outputs], as in GPT-2."""
    epsilon: str = "rms_norm_eps"
    """The key of the configuration for what every norm adds to a mean square."""
    norm_offset: float = 0.0
    """What a norm adds to its weight."""
    scaled_embedding: bool = False
    """The embedding is multiplied by the square root of the number of channels."""
    sizes: Mapping[str, str] = field(
        default_factory=lambda: {
            **{"layers": "num_hidden_layers", "width": "hidden_size", "neurons": "intermediate_size"},
            **{"heads": "num_attention_heads", "groups": "num_key_value_heads", "head_dim": "head_dim"},
        }
    )
    """The field of `Shape` -> the key of the configuration."""

    def reading_norms(self, layers: list[int]) -> list[str]:
        """Return the names of the norms of these layers whose outputs something reads, and of the last norm."""
        return [*(f"{self.layers}.{layer}.{name}" for layer in layers for name in self.norms), self.last_norm]

    def all_norms(self, layers: int) -> list[str]:
        """Return the names of all norms over the channels."""
        names = (*self.norms, *self.post_norms)
        return [*(f"{self.layers}.{layer}.{name}" for layer in range(layers) for name in names), self.last_norm]


_LLAMA = Roles()
_QUERY_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_GEMMA = replace(_LLAMA, norm_offset=1.0, scaled_embedding=True)
_GEMMA2 = replace(
    _GEMMA,
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
ROLES: dict[str, Roles] = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), _LLAMA),
    "qwen3": replace(_LLAMA, uncut=_QUERY_NORMS),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3_text": replace(_GEMMA2, uncut=_QUERY_NORMS),
    "gpt2": Roles(
        layers="transformer.h",
        embeddings=("transformer.wte", "transformer.wpe"),
        last_norm="transformer.ln_f",
        norms=("ln_1", "ln_2"),
        reads={"attn.c_attn": "queries, keys and values", "mlp.c_fc": "neurons"},
        writes={"attn.c_proj": "heads", "mlp.c_proj": "neurons"},
        inputs_first=True,
        epsilon="layer_norm_epsilon",
        sizes={"layers": "n_layer", "width": "n_embd", "neurons": "n_inner", "heads": "n_head"},
    ),
}
"""The model types that can be pruned."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a model that pruning may change, and `head_dim`, which it may not."""

    layers: int
    width: int
    """Embedding channels."""
    neurons: int
    """Of an MLP."""
    heads: int
    """Query heads of a layer."""
    groups: int
    """Key/value heads of a layer."""
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig, roles: Roles) -> "Shape":
        """Read the sizes in a configuration."""
        found: dict[str, Any] = {name: getattr(config, key, None) for name, key in roles.sizes.items()}
        width, heads = found["width"], found["heads"]
        usual = {"neurons": 4 * width, "groups": heads, "head_dim": width // heads}
        return cls(**usual | {name: size for name, size in found.items() if size is not None})


@dataclass(frozen=True)
class Importance:
    """Scores, fp64 on the CPU; higher is more important."""

    heads: Tensor
    """[L, H]"""
    neurons: Tensor
    """[L, I]"""
    outputs: Mapping[str, Tensor]
    """Of the norms that something reads, by name: a score of each channel."""
    shares: Mapping[str, Tensor]
    """Of every norm, by name: the share of each channel in the mean square in front of it."""
    losses: Tensor | None
    """[L], the loss without each layer; None: it was not measured, because all layers stay."""


@dataclass(frozen=True)
class Cut:
    """The parts that stay, as indices in the teacher, ascending."""

    layers: list[int]
    width: Tensor
    heads: list[Tensor]
    """Query heads of each layer in `layers`."""
    groups: list[Tensor]
    neurons: list[Tensor]


def roles_of(config: PreTrainedConfig, name: str) -> Roles:
    """Look up the roles of a model's modules. UsageError: its type is not in the table."""
    if config.model_type not in ROLES:
        raise UsageError(f"{name} is a {config.model_type}, and {', '.join(ROLES)} can be pruned")
    return ROLES[config.model_type]


def wanted_shape(like: ModelSpec, teacher: PreTrainedConfig, name: str) -> Shape:
    """Return the sizes in the spec `like`, to which `teacher`, called `name`, can be cut.

    UsageError: it cannot, with every reason in one line.
    """
    roles = roles_of(teacher, name)
    if like.init == "teacher-layers":
        raise UsageError(f"--like {like.name} copies layers; give a spec with a [config], or a model folder")
    config = configuration(like, teacher.vocab_size)
    if config.model_type != teacher.model_type:
        ours, theirs = config.model_type, teacher.model_type
        raise UsageError(f"--like {like.name} is a {ours} and {name} a {theirs}; give a shape of the teacher's type")
    before, after = Shape.of(teacher, roles), Shape.of(config, roles)
    if like.config is not None and "head_dim" in roles.sizes and getattr(config, "head_dim", None) is None:
        after = replace(after, head_dim=before.head_dim)  # of a type that has no key for it, as qwen2
    wrong = [
        f"{key} = {getattr(after, each)} is more than {getattr(before, each)}"
        for each, key in roles.sizes.items()
        if each != "head_dim" and getattr(after, each) > getattr(before, each)
    ]
    if after.head_dim != before.head_dim:
        wrong.append(
            f"its heads have {after.head_dim} numbers and the teacher's {before.head_dim}, which are not cut: set "
            f"head_dim = {before.head_dim}, or another number of heads"
        )
    if after.heads % after.groups or after.heads // after.groups > before.heads // before.groups:
        have, want = before.heads / before.groups, after.heads / after.groups
        wrong.append(f"it has {want:g} query heads for each key/value head, and the teacher {have:g}")
    wrong += [f"{key} is {ours}, and the teacher's is {theirs}" for key, ours, theirs in _others(like, config, teacher)]
    if wrong:
        raise UsageError(f"--like {like.name} is not a shape to cut {name} to: {'; '.join(wrong)}")
    return after


def _others(like: ModelSpec, config: PreTrainedConfig, teacher: PreTrainedConfig) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys that pruning cannot change, with both values.

    Of a [config] these are all that it states, of a folder those that decide shapes.
    """
    sizes = {*ROLES[teacher.model_type].sizes.values(), "model_type"}
    for key in dict.fromkeys(("vocab_size", *(("tie_word_embeddings",) if like.config is None else like.config))):
        name = type(teacher).attribute_map.get(key, key)
        ours, theirs = getattr(config, name, None), getattr(teacher, name, None)
        if name not in sizes and not _FREE.search(name) and ours != theirs:
            yield key, ours, theirs


def pruned_config(teacher: PreTrainedConfig, like: ModelSpec, after: Shape, layers: list[int]) -> PreTrainedConfig:
    """Derive a configuration from the teacher's, with the sizes `after` and `layers` alone."""
    table = plain_config(teacher)
    roles = ROLES[teacher.model_type]
    # the sizes that a configuration without these keys has
    usual = {"neurons": 4 * after.width, "groups": after.heads, "head_dim": after.width // after.heads}
    for each in fields(Shape):
        key = roles.sizes.get(each.name)
        size = getattr(after, each.name)
        # keys that a configuration may leave out stay out, so that an uncut model has its teacher's
        if key is not None and (table.get(key) is not None or size != usual.get(each.name)):
            table[key] = size
    if after.width < (before := Shape.of(teacher, roles).width):
        table[roles.epsilon] *= before / after.width
    if table.get("layer_types"):
        table["layer_types"] = [table["layer_types"][layer] for layer in layers]
    table |= {key: value for key, value in (like.config or {}).items() if _FREE.search(key)}
    return type(teacher)(**table)


def choose(scores: Importance, roles: Roles, before: Shape, after: Shape) -> Cut:
    """Choose the parts of a model that stay, by their scores; of equal ones the first."""
    layers = list(range(before.layers))
    if after.layers < before.layers:
        assert scores.losses is not None
        layers = _best(scores.losses, after.layers).tolist()
    channels = torch.stack([scores.outputs[name] for name in roles.reading_norms(layers)]).sum(0)
    queries = after.heads // after.groups
    heads = []
    groups = []
    for layer in layers:
        by_group_GQ = scores.heads[layer].view(before.groups, -1)
        own = [_best(of_group, queries) for of_group in by_group_GQ]
        sums = torch.stack([of_group[best].sum() for of_group, best in zip(by_group_GQ, own, strict=True)])
        groups.append(_best(sums, after.groups))
        heads.append(torch.cat([group * by_group_GQ.shape[1] + own[group] for group in groups[-1].tolist()]))
    neurons = [_best(scores.neurons[layer], after.neurons) for layer in layers]
    return Cut(layers, _best(channels, after.width), heads, groups, neurons)


def _best(scores: Tensor, number: int) -> Tensor:
    return scores.sort(descending=True, stable=True).indices[:number].sort().values


def prune(teacher: PreTrainedModel, like: ModelSpec, after: Shape, cut: Cut, shares: Mapping[str, Tensor]) -> Any:
    """Build a float32 model on the CPU, in evaluation mode, from the parts of `teacher` that stay.

    The teacher does not change. shares: as in `Importance`. UsageError: the teacher has a weight of no known role.

    shares: as in `Importance`. UsageError: the teacher has a weight of no known role.
    """
    roles = ROLES[teacher.config.model_type]
    before = Shape.of(teacher.config, roles)
    config = pruned_config(teacher.config, like, after, cut.layers)
    with torch.random.fork_rng(devices=[]):
        student = new_model(like.name, config, like.attention, trust_remote_code=False)
    given = teacher.state_dict()
    weights = {}
    narrower = after.width < before.width
    stretch = math.sqrt(before.width / after.width) if roles.scaled_embedding else 1.0
    tied = bool(config.tie_word_embeddings)
    for name in student.state_dict():
        module, _, leaf = name.rpartition(".")
        inside = re.fullmatch(rf"{re.escape(roles.layers)}\.(\d+)\.(.+)", module)
        layer, inner = (int(inside[1]), inside[2]) if inside else (0, module)
        source = f"{roles.layers}.{cut.layers[layer]}.{inner}" if inside else module
        weight = given[f"{source}.{leaf}"].detach().cpu().float()
        for axis, kind in enumerate(_axes(roles, inner, leaf)):
            if kind is not None:
                weight = weight.index_select(axis, _places(kind, cut, layer, before))
        if narrower and source in shares and leaf == "weight":
            factor = math.sqrt(float(shares[source][cut.width].sum()) * before.width / after.width)
            factor /= stretch if tied and source == roles.last_norm else 1.0
            weight = (weight + roles.norm_offset) * factor - roles.norm_offset
        if narrower and f"{inner.removesuffix('_proj')}_norm" in roles.uncut:
            weight = weight * math.sqrt(before.width / after.width)
        if narrower and (module == roles.embeddings[0] or (tied and module == roles.head)):
            weight = weight * stretch
        weights[name] = weight
    student.load_state_dict(weights)
    if teacher.generation_config is not None:
        student.generation_config = copy.deepcopy(teacher.generation_config)
    return student.eval().requires_grad_(False)


def _axes(roles: Roles, module: str, leaf: str) -> tuple[str | None, ...]:
    """Name the kind of each axis of a weight, None for an axis that stays whole.

    UsageError: the weight has no known role.
    """
    if module in (roles.last_norm, *roles.norms, *roles.post_norms):
        return ("width",)
    if module in roles.uncut:
        return (None,)
    axes: tuple[str | None, str | None]
    if module in roles.reads:
        axes = roles.reads[module], "width"
    elif module in roles.writes:
        axes = "width", roles.writes[module]
    elif module in roles.embeddings or module == roles.head:
        return (None, "width")
    else:
        raise UsageError(f"the teacher has a weight {module}.{leaf} that its model type usually has not; it is not cut")
    if leaf == "bias":
        return axes[:1]
    return axes[::-1] if roles.inputs_first else axes


def _places(kind: str, cut: Cut, layer: int, before: Shape) -> Tensor:
    """Return the indices that stay of an axis."""
    if kind in ("width", "neurons"):
        return cut.width if kind == "width" else cut.neurons[layer]
    number = torch.arange(before.head_dim)
    numbers = cut.groups[layer] if kind == "groups" else cut.heads[layer]
    places = (numbers[:, None] * before.head_dim + number).flatten()
    whole = before.heads * before.head_dim
    return torch.cat([places + part * whole for part in range(3)]) if kind.startswith("queries") else places
