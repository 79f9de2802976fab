"""Tensor parallelism: several ranks compute one forward of a student together, each with a part of its weights.

The plan is the model's own in transformers (Megatron-LM, arXiv 1909.08053): the first linear layers of an attention or
a feed-forward block are cut by their outputs (`colwise`: heads, inner units), the last one by its inputs (`rowwise`),
whose results are summed. PyTorch's styles make the parts DTensors. Here the vocabulary is cut too: the rows of the
embedding and of the output head, one parameter where they are tied, as `torch.chunk` cuts them. Norms stay whole.

Where the tensor ranks divide the length of a row, the residual stream between blocks is cut along it in training
(sequence parallelism, arXiv 2205.05198): norms work on a part of the positions, activations that are kept shrink with
the ranks, and each sum of a block becomes a reduce-scatter with an all-gather before the next, the same bytes.

A weight that each rank holds whole sees a part of what its gradient is over where it works inside a cut: heads for the
norms of queries and keys, positions for all norms of the layers under sequence parallelism. These gradients are summed
once a step (`training.step`), not in each backward: transformers' own hook sums what earlier micro-batches have added
up again. Of all other whole weights the first rank's gradient counts, so that all ranks hold the same bits.

Dropout draws the same random numbers on all ranks where the stream is whole, and others on each within a cut: of heads
between the first and the last layer of a block, of positions in all layers under sequence parallelism.

Where there are more ranks than heads of keys and values, several share a head: each holds and multiplies its part of
the head's rows, and they gather the result, whose gradients are summed. So weights, gradients and moments of such
layers are cut as all others.

`apply` proves a plan on a probe: the hidden states, and the gradients of every weight that stays whole, must be those
of the whole model.

Given up: mixtures of experts, whose plans have styles of their own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion
from transformers import PreTrainedConfig, PreTrainedModel

from kdtrain.config.commands import DistillConfig
from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel, evaluating, layers_of
from kdtrain.models.loading import configuration, whole_model, without_numbers
from kdtrain.models.spec import ModelSpec
from kdtrain.objective.divergence import adds_up
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.parallelize import Traffic
from kdtrain.parallel.quantised import cut_product
from kdtrain.precision.draws import DrawsApart
from kdtrain.precision.formats import Formats
from kdtrain.precision.modes import Switch
from kdtrain.ranks import all_reduce_sum, device_mesh, world_size

_CUT = ("colwise", "rowwise")
_SUMMED = "replicated_with_grad_allreduce"
_HEADS, _KEYS = "num_attention_heads", "num_key_value_heads"
_COUNTS = (_HEADS, _KEYS, "intermediate_size")
_OF_KEYS = ("k_proj", "v_proj")
"""The layers of keys and values in all plans of models that have a number of them."""
_LEAST = {"torch": "2.11", "transformers": "5.17"}
"""The oldest releases that are supported; gradients were compared under torch 2.13 and transformers 5.23."""
_NEAR, _NEAR_NARROW = 5e-3, 5e-2
"""What TF32 rounds, and weights of 16 bits; a wrong plan is off by a tenth and more."""
STUDENT, TEACHER = "--tensor-parallel", "--teacher-tensor-parallel"
"""The option by which a model is cut, for messages."""


def refuse_plan(
    config: PreTrainedConfig, name: str, size: int, vocab_size: int, option: str = STUDENT
) -> dict[str, str]:
    """Return the plan of the model of a configuration, by names within its base model.

    Raises:
        UsageError: it has none, or none that `size` ranks can follow; the message names what can be.
    """
    text = config.get_text_config()
    instead = f"use {option.replace('tensor-parallel', 'parallel fsdp')}"
    for library, least in _LEAST.items():
        if TorchVersion(found := metadata.version(library)) < least:
            raise UsageError(
                f"{option} needs {library} {least} or newer, and {found} is installed; upgrade it, or {instead}"
            )
    plan: dict[str, str] = dict(getattr(text, "base_model_tp_plan", None) or {})
    if not plan:
        raise UsageError(
            f"{option}: transformers {transformers.__version__} has no plan for {name} ({text.model_type}); models "
            f"like Llama, Mistral, Qwen2, Qwen3, Gemma and Phi have one; {instead}"
        )
    if other := sorted({*plan.values()} - {*_CUT, _SUMMED}):
        raise UsageError(
            f"{option}: the plan of {name} ({text.model_type}) has the style {other[0]}, which only mixtures of "
            f"experts and fused layers have; {instead}"
        )
    counts = {each: value for each in _COUNTS if isinstance(value := getattr(text, each, None), int)}

    def fits(each: str, ranks: int) -> bool:
        shared = each == _KEYS and ranks % counts[each] == 0 and _head_size(text) % (ranks // counts[each]) == 0
        return shared or counts[each] % ranks == 0

    if wrong := [each for each in counts if not fits(each, size)]:
        able = [n for n in range(2, max(counts.values()) + 1) if all(fits(each, n) for each in counts)]
        which = f"choose {', '.join(map(str, able))}" if able else instead
        raise UsageError(f"{option} {size} does not divide {wrong[0]} = {counts[wrong[0]]} of {name}; {which}")
    rows = vocab_size  # a teacher's head stays whole
    if option == STUDENT:
        rows = max(text.vocab_size, vocab_size)  # of which some may be no token's
    if vocab_size <= (size - 1) * -(-rows // size):
        raise UsageError(f"{option} {size}: a rank would have none of the {vocab_size} tokens of {name}")
    return plan


def refuse_with(
    config: DistillConfig, student: ModelSpec, vocab_size: int | None, facts: Any, formats: Formats
) -> None:
    """Refuse what tensor parallelism is not made for, and a student whose model it cannot cut.

    facts: of the data, if they are known.
    """
    size = config.parallel.tensor_parallel
    choice = formats.choice
    option = f"{STUDENT} {size}"
    multiple: Any = 1 if choice is None else getattr(choice.backend, "part_multiple", None)
    dense = config.online or (facts is not None and any(each.targets == "dense" for each in facts.taught or [facts]))
    refused = {
        f"--fp8-backend {choice and choice.name}, whose scales are of a rank's part alone": multiple is None,
        "adapters (--lora-rank) beside quantised layers": choice is not None and student.lora is not None,
        "--lora-dora, whose norms of columns go over ranks": student.lora is not None and student.lora.lora_dora,
        f"--base-weights {student.weights}, whose packed layers are whole": student.weights is not None,
        "a teacher of another tokenizer, whose cells of tokens need whole rows": facts is not None
        and facts.alignment is not None,
        f"--divergence {config.objective.divergence} over whole distributions, as it is not a sum over tokens": dense
        and config.objective.distils
        and not adds_up(config.objective.divergence),
    }
    if (why := next((each for each, holds in refused.items() if holds), None)) is not None:
        instead = "fsdp" if student.weights is None else "ddp"
        raise UsageError(f"{option} cannot be used with {why}; use --parallel {instead}")
    theirs = configuration(student, vocab_size)
    rows = vocab_size or theirs.vocab_size
    plan = refuse_plan(theirs, student.name, size, rows)
    if choice is None:
        return
    whole: Any = without_numbers(student.name, theirs, trust_remote_code=student.trust_remote_code)
    modules, widths = dict(whole.base_model.named_modules()), dict[str, int]()
    for path, style in plan.items():
        for each in _matching(path, modules) if style in _CUT else ():
            outputs, inputs = modules[each].weight.shape
            if choice.backend.refuses(inputs, outputs, False) is None:
                widths[path] = inputs if style == "rowwise" else outputs

    def fits(ranks: int) -> bool:
        try:
            refuse_plan(theirs, student.name, ranks, rows)
        except UsageError:
            return False
        return not any(width % (ranks * multiple) for width in widths.values())

    if wrong := [path for path, width in widths.items() if width % (size * multiple)]:
        able = [ranks for ranks in range(2, max(widths.values()) // multiple + 1) if fits(ranks)]
        choose = f"choose {', '.join(map(str, able))}, or " if able else ""
        raise UsageError(
            f"{option} cuts the {widths[wrong[0]]} numbers of {wrong[0]} in {student.name} into parts that are no "
            f"multiples of {multiple}, as {choice.mode} needs; {choose}use --parallel fsdp"
        )


def apply(
    model: SplitModel,
    layout: RankLayout,
    device: torch.device,
    *,
    vocab_size: int,
    sequence: bool,
    option: str = STUDENT,
) -> None:
    """Cut a whole model, which has the same bits on each rank, over the tensor ranks, in place. All ranks call it.

    Layers are made switchable before, and sharded over data ranks (`parallelize.shard`) after it.

    Args:
        device: of this rank, to which the model moves.
        vocab_size: tokens that count; the head may have more rows.
        sequence: whether to cut the residual stream, for rows whose length the tensor ranks divide.
        option: that asks for it, for messages.

    Raises:
        UsageError: the plan does not fit the model, or does not give its hidden states and gradients.
    """
    whole = whole_model(model)
    mesh = layout.tensor_mesh
    name = type(whole).__name__
    size = layout.tensor_size
    if not model.fused:
        raise UsageError(f"{option} needs an output head that is split off: {model.reason}")
    plan = refuse_plan(whole.config, name, size, vocab_size, option)
    tokens_BT = torch.randint(vocab_size, (2, size * -(-16 // size)), generator=torch.Generator().manual_seed(0))
    base: Any = whole.base_model
    modules = dict(base.named_modules())
    styled = {each: style for path, style in plan.items() for each in _matching(path, modules)}
    blocks = {each.rpartition(".")[0] for each, style in styled.items() if style == "colwise"}
    cut = {id(modules[each].weight) for each, style in styled.items() if style in _CUT}
    for each in (whole.get_input_embeddings(), whole.get_output_embeddings()):
        cut |= {id(parameter) for parameter in each.parameters()}
    stays = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in cut]
    expected = _probe(model, tokens_BT.to(whole.device), stays)
    cutting = _Cutting(whole, mesh, sequence)
    settings = whole.config.get_text_config().to_dict().items()
    if any(value for each, value in settings if each.endswith(("dropout", "pdrop"))):
        cutting.draws = DrawsApart(layout.tensor_rank, device)
    for each in blocks:
        modules[each].register_forward_pre_hook(cutting.enter, with_kwargs=True)
    embedding = whole.get_input_embeddings()
    head = whole.get_output_embeddings()
    tied = head.weight is embedding.weight
    _cut_rows(embedding, mesh)
    embedding.register_forward_pre_hook(cutting.look_up)
    embedding.register_forward_hook(cutting.found)
    if tied:
        head.weight = embedding.weight
    summed = [each for path, style in styled.items() if style == _SUMMED for each in modules[path].parameters()]
    for each, style in styled.items():
        how: Any = ColwiseParallel() if style == "colwise" else None
        if style == "rowwise":
            how = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
        if how is not None:
            layer: Any = getattr(modules[each], "base_layer", modules[each])
            parallelize_module(layer, mesh, how, src_data_rank=None)
            cut_product(layer, mesh, style)
            if layer is not modules[each]:
                from kdtrain.parallel.cut_adapters import cut_adapter  # which other students do without

                summed += cut_adapter(modules[each], mesh, style)
        if style == "rowwise":
            modules[each].register_forward_hook(cutting.leave)
        elif cutting.sharing is not None and each.endswith(_OF_KEYS):
            modules[each].register_forward_hook(cutting.share)
            block: Any = modules[each.rpartition(".")[0]]
            block.num_key_value_groups = getattr(whole.config.get_text_config(), _HEADS) // size
    _cut_rows(head, mesh)
    layers = layers_of(base)
    layers[0].register_forward_pre_hook(cutting.begin)
    for layer in layers if sequence else ():
        layer.register_forward_pre_hook(cutting.draw_apart)
        layer.register_forward_hook(cutting.draw_alike)
    layers[-1].register_forward_hook(cutting.end)
    _settle(model, device)
    model.tensor = mesh
    inside = {id(each) for layer in layers for each in layer.parameters()} if sequence else set()
    inside |= {id(each) for each in summed}
    model.once = {
        each: id(parameter) in inside and not isinstance(parameter, DTensor)  # which sums in each backward
        for each, parameter in model.named_parameters()
        if not (isinstance(parameter, DTensor) and parameter.placements[0].is_shard())
    }
    with cutting.as_in_training():
        found = _probe(model, tokens_BT.to(device), [each for each in stays if each in model.once], mesh.get_group())
    for what, value in found.items():
        error = float((value - expected[what]).norm() / expected[what].norm().clamp(min=1e-30))
        if not error <= (_NEAR if value.dtype.itemsize > 2 else _NEAR_NARROW):
            raise UsageError(
                f"{option}: the plan of transformers {transformers.__version__} does not give {what} of {name} (off by "
                f"{error:.1g}); use {option.replace('tensor-parallel', 'parallel fsdp')}"
            )


def in_turns(layout: RankLayout, alike: int) -> Callable[..., Any]:
    """Return what calls a model of tensor ranks that read different sequences: those of one rank after another's.

    Each rank calls it as often as the others, with a forward, tokens [B, T], segments [B, T] or none, and more that is
    the same on all; it gets what the forward returns of its own. alike: tensor ranks, one behind the other, that always
    read the same.
    """
    group = layout.tensor_mesh.get_group()
    own = layout.tensor_rank // alike * alike

    def call(forward: Callable[..., Any], tokens_BT: Tensor, segments_BT: Tensor | None, *more: Any) -> Any:
        found = None
        for source in range(0, layout.tensor_size, alike):
            inputs_CBT = torch.stack([tokens_BT] if segments_BT is None else [tokens_BT, segments_BT])
            shape = torch.tensor(inputs_CBT.shape, device=inputs_CBT.device)
            dist.broadcast(shape, group=group, group_src=source)
            if source != layout.tensor_rank:
                inputs_CBT = inputs_CBT.new_empty(shape.tolist())
            dist.broadcast(inputs_CBT, group=group, group_src=source)
            output = forward(inputs_CBT[0], None if segments_BT is None else inputs_CBT[1], *more)
            found = output if source == own else found
        return found

    return call


def traffic(
    model: SplitModel, tokens: int, *, micro_batches: int, sequence: bool, itemsize: int, recomputes: bool
) -> tuple[tuple[Traffic, int], tuple[Traffic, int]]:
    """Count a step of tensor ranks, but for the sums of the objective and the scales, a few numbers per token.

    Returns what all of them exchange, and what those do that share a head of keys and values; each with how many.

    Args:
        tokens: of a micro-batch.
        sequence: whether the residual stream is cut, see `apply`.
        itemsize: bytes of a number that a block returns.
        recomputes: whether the backward computes layers again: all of them but their last sum.
    """
    parameters = {name: each for name, each in model.named_parameters() if ".lora_" not in name}
    blocks = sum(isinstance(each, DTensor) and each.placements[-1].is_shard(1) for each in parameters.values())
    enters = leaves = blocks
    if recomputes:
        enters = 2 * blocks
        leaves = 2 * blocks - len(layers_of(model))
    numbers = tokens * model.head.weight.shape[1]  # type: ignore[union-attr]
    wide, narrow = 4.0 * numbers, float(itemsize) * numbers
    gathered = scattered = 0.0
    summed = 2 * wide  # the embedding, and the gradient of hidden states at the head
    if sequence:
        gathered = wide * (enters + 2) + narrow * blocks
        scattered = narrow * leaves + wide * blocks
    else:
        summed += narrow * leaves + wide * blocks
    text = whole_model(model).config.get_text_config()
    sharing = _sharing(text, model.tensor.size())
    shared = 0.0
    if sharing > 1:
        shared = micro_batches * len(_OF_KEYS) * len(layers_of(model)) * float(itemsize) * tokens * _head_size(text)
    whole = map(model.get_parameter, model.once)
    once = sum(4.0 * each.numel() for each in whole if each.requires_grad)
    every = Traffic(
        all_gather=micro_batches * gathered,
        reduce_scatter=micro_batches * scattered,
        all_reduce=micro_batches * summed + once,
    )
    heads = Traffic(all_gather=shared * (2 if recomputes else 1), reduce_scatter=shared)
    return (every, model.tensor.size()), (heads, sharing)


def _head_size(text: Any) -> int:
    """Return the numbers of a head."""
    return int(getattr(text, "head_dim", None) or text.hidden_size // getattr(text, _HEADS))


def _sharing(text: Any, size: int) -> int:
    """Return how many of `size` tensor ranks share a head of keys and values, by a configuration."""
    heads = getattr(text, _KEYS, None)
    return max(1, size // heads) if isinstance(heads, int) else 1


class _Cutting:
    """The hooks at which the residual stream and the blocks meet."""

    def __init__(self, model: PreTrainedModel, mesh: Any, sequence: bool) -> None:
        self.model = model
        self.mesh = mesh
        self.sequence = sequence
        self.probes = False
        self.draws: DrawsApart | None = None
        """Of a model with dropout."""
        self.sharing: Any = None
        if (ranks := _sharing(model.config.get_text_config(), mesh.size())) > 1:  # with consecutive numbers
            shape = world_size() // ranks, ranks
            self.sharing = device_mesh(mesh.device_type, shape, ("heads", "parts"))["parts"]

    def stream(self) -> Any:
        """Return the placement of the residual stream over the tensor ranks now."""
        return Shard(1) if self.sequence and (self.model.training or self.probes) else Replicate()

    @contextmanager
    def as_in_training(self) -> Iterator[None]:
        """Cut the stream in evaluation mode too."""
        self.probes = True
        yield
        self.probes = False

    def look_up(self, module: Any, inputs: tuple[Any, ...]) -> Any:
        """Look up this rank's rows of the embedding alone; `found` gives the parameter back."""
        weight = module.weight
        (ids_BT,) = inputs
        own = weight.to_local(grad_placements=weight.placements)
        rows = ids_BT - self.mesh.get_local_rank() * -(-weight.shape[0] // self.mesh.size())
        self.here_BT = (rows >= 0) & (rows < len(own))
        self.weight = weight
        module._parameters["weight"] = own
        return rows.masked_fill(~self.here_BT, 0)

    def found(self, module: Any, inputs: Any, output_BTD: Tensor) -> Tensor:
        """Sum what the ranks have found."""
        module._parameters["weight"] = self.weight
        own_BTD = output_BTD.masked_fill(~self.here_BT[..., None], 0.0)
        return self._moved(own_BTD, Partial(), Replicate())

    def begin(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        """Cut the stream before the first layer."""
        return self._moved(inputs[0], Replicate(), self.stream()), *inputs[1:]

    def end(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Join the stream behind the last layer; a copy, as FSDP2 hooks what a layer returns, which is no view."""
        if isinstance(output, tuple):
            return self._moved(output[0], self.stream(), Replicate()).clone(), *output[1:]
        return self._moved(output, self.stream(), Replicate()).clone()

    def enter(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Give a block all positions; the gradients of its parts are summed where it leaves."""
        if not self.sequence:
            self.draw_apart()
        stream = inputs[0] if inputs else named["hidden_states"]
        stream = DTensor.from_local(stream, self.mesh, [self.stream()], run_check=False)
        stream = stream.redistribute(placements=[Replicate()])
        return ((stream, *inputs[1:]), named) if inputs else (inputs, {**named, "hidden_states": stream})

    def leave(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Sum the parts of a block's result."""
        if not self.sequence:
            self.draw_alike()
        if not isinstance(output, DTensor):  # of an adapted layer
            output = DTensor.from_local(output, self.mesh, [Partial()], run_check=False)
        return output.redistribute(placements=[self.stream()]).to_local()

    def draw_apart(self, *_: Any) -> None:
        """Let dropout draw other numbers than on the other ranks."""
        if self.draws is not None and self.model.training:
            self.draws.begin()

    def draw_alike(self, *_: Any) -> None:
        """Let dropout draw the numbers of the other ranks again."""
        if self.draws is not None and self.model.training:
            self.draws.end()

    def share(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Gather a head of keys or values from the ranks that share it, each of which sees a part of its gradient."""
        part = DTensor.from_local(output, self.sharing, [Shard(output.ndim - 1)], run_check=False)
        return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _moved(self, tensor: Tensor, before: Any, after: Any) -> Tensor:
        if before == after:
            return tensor
        return (
            DTensor.from_local(tensor, self.mesh, [before], run_check=False).redistribute(placements=[after]).to_local()
        )


def _matching(path: str, modules: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the modules that a path of a plan names, where * is a layer's number; also within the model's wrapper."""
    wanted = path.split(".")
    for each in modules:
        parts = each.split(".")
        if len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True)):
            yield each


def _cut_rows(module: nn.Module, mesh: Any) -> None:
    """Cut the parameters of an embedding or an output head along the vocabulary."""
    for name, parameter in [*module.named_parameters(recurse=False)]:
        if not isinstance(parameter, DTensor):
            rows = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(rows, requires_grad=parameter.requires_grad))


def _settle(model: nn.Module, device: torch.device) -> None:
    """Move whole tensors to `device`, and give each part memory of its own: a view would keep the whole alive."""
    for module in model.modules():
        for parameter in module._parameters.values():
            if isinstance(parameter, DTensor):
                own = parameter._local_tensor
                if own.untyped_storage().nbytes() > own.nbytes:
                    parameter._local_tensor = own.clone(memory_format=torch.contiguous_format)
            elif parameter is not None:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def _probe(model: SplitModel, tokens_BT: Tensor, names: list[str], group: Any = None) -> dict[str, Tensor]:
    """Compute a probe's hidden states and the gradients of the parameters `names`, neither quantised nor with dropout.

    They are on the CPU.

    group: of the tensor ranks, over which a gradient in parts is summed; None before the model is cut.
    """
    parameters = dict(model.named_parameters())
    modules: list[Any] = [*model.modules()]
    switch = next((each.switch for each in modules if hasattr(each, "switch")), Switch())
    with evaluating(model), torch.enable_grad(), switch.at("high"):
        hidden_BTD = model(tokens_BT)
        chance = torch.Generator().manual_seed(1)
        towards_BTD = torch.randn(hidden_BTD.shape, generator=chance).to(hidden_BTD)
        wanted = [parameters[each] for each in names]  # none of a teacher
        gradients = torch.autograd.grad((hidden_BTD * towards_BTD).sum(), wanted) if names else ()
    found = {"the hidden states": hidden_BTD.detach().cpu()}
    for name, gradient in zip(names, gradients, strict=True):
        own = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if group is not None and model.once[name] and not isinstance(gradient, DTensor):
            own = all_reduce_sum(own, group)
        found[f"the gradient of {name}"] = own.cpu()
    return found
