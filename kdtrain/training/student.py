"""The student and its loss as one module, which a wrapper (DDP, FSDP2, accelerate, Trainer) can take as it is.

One `forward` calls backbone, output head and loss, so that a wrapper sees every parameter that takes part. The backbone
is compiled, as a whole or layer by layer; the objective's engine compiles its own elementwise operations. The module
is a `PreTrainedModel` for the trainers that ask for one: they find configuration and embeddings, checkpoint
activations, and save what `from_pretrained` loads.

Shape suffixes: B sequences, T positions, N tokens (B*T), D model width, K kept entries, G knots of beta.
"""

import contextlib
import inspect
import math
import sys
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from einops import rearrange
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdtrain.config.sections import QUANTIZED
from kdtrain.errors import UsageError, as_number, as_whole
from kdtrain.models.head import SplitModel, evaluating, layer_widths, router_weight, split
from kdtrain.models.output_head import refuse_vocabulary
from kdtrain.objective.alpha import MeasuredAlpha, too_few
from kdtrain.objective.batch import SPARSE, Batch, Collator
from kdtrain.objective.loss import DistillationLoss, LossOutput, joined
from kdtrain.objective.measured import measured
from kdtrain.objective.metrics import chunks, measure
from kdtrain.objective.targets import per_token
from kdtrain.objective.temperature import Temperature
from kdtrain.parallel.parallelize import reshard
from kdtrain.precision.modes import MODES, Switch, autocast, head_dtype
from kdtrain.ranks import all_reduce_sum, world_size

if TYPE_CHECKING:
    from kdtrain.models.generate import Decoder
    from kdtrain.objective.hidden import HiddenLoss
    from kdtrain.precision.compiled import CompiledLayers

FIELDS = (
    *("tokens", "loss_mask", "segments", "labels", *SPARSE, "knots", "num_samples", "vocabulary", "temperature_range"),
    *("replay", "compared", "teacher_bytes", "partial", "policy"),
)
"""The tensors of a batch that a student takes by name: see `Batch.fields` and `Student.forward`."""
LOSS_FILE = "kdtrain/loss.safetensors"
"""Holds the loss's state beside a model's weights; in a folder, because servers load every *.safetensors next to a
config.json."""

EvaluationOutput = namedtuple("EvaluationOutput", (*LossOutput._fields, "rows"))  # type: ignore[misc]
"""A `LossOutput` and `rows`, [B, M] fp64: the sums of `Metrics.vector` of each sequence, for `evaluation_metrics`.
`transformers.Trainer` gathers all but the loss."""


class Student(PreTrainedModel):
    """A causal language model and its distillation loss.

    The module uses the model's own parameters, and changes the model only where `document_mask` requires it. It is in
    the model's mode: `from_pretrained` returns a model in evaluation mode, whose dropout `train()` turns on.

    Args:
        model: of `transformers`, with or without adapters of `peft`, or already split into backbone and output head.
        loss: the training objective.
        data: the data set whose batches it reads, such as `cache["train"]`. Needed where tensors do not hold all, as of
            `cache["train"].aligned(tokenizer)`; else its codec is read from the first batch.
        vocab_size: the vocabulary of the data; rows of the head beyond it are padding. None: all rows count.
        mode: number format of the backbone's forward (`fp32`, `bf16`, `fp16`), except for quantised layers; `fp32`
            leaves it to an autocast around the call.
        document_mask: keep packed documents from seeing each other.
        compile: compile backbone and objective.
        compile_mode: the `mode` of `torch.compile`.
        by_layer: compile the backbone's layers one by one (`precision.compiled`), in place: under DDP and FSDP2 a graph
            of the whole backbone would be cut.
        hidden_loss: compares hidden states of `layers` with the teacher's, times `hidden_weight`; None: no such loss.
        switch: switches the model's linear layers to the mode `quantized`; None where there is none.

    Raises:
        UsageError: model or loss is something else, there is no such mode, or `vocab_size` is more than the model's.

    >>> from kdtrain.testing import tiny_model
    >>> student = Student(tiny_model("llama", 300), DistillationLoss(alpha=0.0))
    >>> output = student(tokens=torch.randint(0, 300, (2, 9)), loss_mask=torch.ones(2, 8, dtype=torch.bool))
    >>> output.tokens
    tensor(16)
    """

    accepts_loss_kwargs = True
    """Makes `transformers.Trainer` pass `num_items_in_batch`."""
    main_input_name = "tokens"

    def __init__(
        self,
        model: PreTrainedModel | SplitModel,
        loss: DistillationLoss,
        *,
        data: Any = None,
        vocab_size: int | None = None,
        mode: str = "fp32",
        document_mask: bool = False,
        compile: bool = False,
        compile_mode: str | None = None,
        by_layer: bool = False,
        hidden_loss: "HiddenLoss | None" = None,
        hidden_weight: float = 1.0,
        layers: tuple[int, ...] = (),
        switch: Switch | None = None,
        quantized: str | None = None,
    ) -> None:
        nn.Module.__init__(self)  # that of PreTrainedModel sets up a configuration, and this one is the model's
        if not isinstance(model, SplitModel):
            if not hasattr(model, "get_output_embeddings"):
                raise UsageError(f"model is a {type(model).__name__}; give a causal language model of transformers")
            model = split(model, keep_attention=not document_mask)
        if not isinstance(loss, DistillationLoss):
            raise UsageError(f"loss is a {type(loss).__name__}; give a DistillationLoss")
        if mode not in MODES:
            raise UsageError(f"mode {mode} is not one of {', '.join(MODES)}")
        if not isinstance(switch, Switch | None):
            raise UsageError(f"switch is a {type(switch).__name__}; give a Switch")
        if hidden_loss is not None:
            from kdtrain.objective import hidden

            if not isinstance(hidden_loss, hidden.HiddenLoss):
                raise UsageError(f"hidden_loss is a {type(hidden_loss).__name__}; give a HiddenLoss")
        if quantized is not None and (switch is None or quantized not in QUANTIZED):
            raise UsageError(f"quantized {quantized} is not one of {', '.join(QUANTIZED)} with the switch of quantize_")
        if not 0 <= as_number(hidden_weight, "hidden_weight") < math.inf:
            raise UsageError(f"hidden_weight {hidden_weight} is not a finite number of at least 0")
        if vocab_size is not None and not as_whole(vocab_size, "vocab_size", 1) <= model.vocab_size:
            raise UsageError(f"vocab_size {vocab_size} is not between 1 and the model's {model.vocab_size}")
        self.model = model
        self.loss = loss
        self.vocab_size = vocab_size or self.model.vocab_size
        self.mode = mode
        self.document_mask = document_mask
        self.compile_objective = compile
        self.hidden_loss = hidden_loss
        self.hidden_weight = hidden_weight
        self.layers = layers
        self.router_weight = router_weight(model.model)
        self.switch = switch or Switch()
        self.quantized = quantized
        self._collator = Collator.of(data)
        self._checked = set[str]()
        self.compiled: CompiledLayers | None = None
        self.backbone = self._backbone
        if compile:
            from kdtrain.precision import compiled

            if by_layer:
                self.compiled = compiled.CompiledLayers(self.model, mode=compile_mode)
                self.backbone = self.compiled.calling(self._backbone)
            else:
                if self.router_weight:
                    layer_widths(self.model)  # the first forward that collects installs hooks, which would cut a graph
                self.backbone = compiled.compiled_whole(self._backbone, mode=compile_mode)
        self.register_state_dict_post_hook(_without_tied)
        self.register_load_state_dict_pre_hook(_from_names_of_the_model)
        self.register_load_state_dict_post_hook(_tied_are_not_missing)
        own: Any = model.model
        self.config = own.config
        self.generation_config: Any = getattr(own, "generation_config", None)
        self.supports_gradient_checkpointing = own.supports_gradient_checkpointing
        self._no_split_modules = own._no_split_modules
        self.train(own.training)

    def get_input_embeddings(self) -> nn.Module:
        """Return the input embeddings of the model."""
        return self.model.model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """Return the output embeddings of the model."""
        return self.model.model.get_output_embeddings()

    def tie_weights(self, *args: Any, **options: Any) -> None:
        """Tie the model's weights."""
        self.model.model.tie_weights(*args, **options)

    def save_pretrained(self, save_directory: Path | str, state_dict: Any = None, **options: Any) -> None:  # type: ignore[override]
        """Write the trained model to a folder that `AutoModelForCausalLM.from_pretrained` loads; Trainer calls this.

        What the loss holds (a learned temperature, the averages of alpha, projections) is written to `LOSS_FILE` in it.

        Args:
            state_dict: weights by their names in the student, instead of the present ones.
            options: of the model's own `save_pretrained`.
        """
        state = self.state_dict() if state_dict is None else state_dict
        held = {name: state[name].contiguous() for name in state if name.startswith(("loss.", "hidden_loss."))}
        weights = {name.removeprefix(_OF_THE_MODEL): state[name] for name in state if name not in held}
        self.model.model.save_pretrained(save_directory, state_dict=weights, **options)
        if held and options.get("is_main_process", True):
            path = Path(save_directory, LOSS_FILE)
            path.parent.mkdir(exist_ok=True)
            save_file(held, path)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load the student's state dict or the model's; with one that Trainer reads, what the loss held beside it.

        Trainer reads the weights of a checkpoint and then passes no path on. So the path of the weights is looked up
        among the variables of the caller: if it is not found, Trainer warns of missing keys.
        """
        for each in sys._getframe(1).f_locals.values():
            if isinstance(each, str) and Path(each).name.startswith("model.safetensors"):
                path = Path(each).parent / LOSS_FILE
                state_dict = {**(load_file(path) if path.is_file() else {}), **state_dict}
        return super().load_state_dict(state_dict, *args, **options)

    def train(self, mode: bool = True) -> Self:
        """Set the mode as `nn.Module.train`. The first time for training, warn of weights in half precision."""
        if mode and "weights" not in self._checked:
            self._checked.add("weights")
            for dtype in {each.dtype for each in self.parameters() if each.requires_grad and each.dtype.itemsize == 2}:
                text = "small updates round away; load its model by from_pretrained(..., dtype=torch.float32)"
                warnings.warn(f"the student trains weights in {dtype}: {text}", stacklevel=2)
        return super().train(mode)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    @property
    def temperature(self) -> Temperature:
        """The temperature of the loss."""
        return self.loss.temperature

    @property
    def present_mode(self) -> str:
        """The mode of the matrix products in the next forward."""
        return self.quantized if self.quantized and self.switch.position == "quantized" else self.mode

    def forward(
        self,
        batch: Batch | None = None,
        num_items_in_batch: Tensor | float | None = None,
        **fields: Tensor | None,
    ) -> LossOutput:
        """Return the loss to differentiate and the sums to report, for a batch or for its named tensors.

        In evaluation mode the value of the loss is the cross-entropy, as in the validation of a run, and its gradient
        still that of the objective: `from_pretrained` returns a model in this mode. Without gradients the forward is
        neither compiled nor quantised then, and an `EvaluationOutput` is returned.

        Args:
            batch: B sequences of T + 1 tokens with their targets.
            num_items_in_batch: the divisor of sums over tokens: the unmasked tokens of the whole optimizer step, over
                micro-batches and ranks. None: the unmasked tokens of this batch. The value of a tensor is not checked.
            fields: the tensors of `Batch.fields` by name (`FIELDS`), with or without targets, and the two that
                `CacheReader` adds. `vocabulary` and `temperature_range` are read from the first batch only.
                `replay` marks the batches of a `Mixture` that no teacher saw: their loss is cross-entropy alone.

        Raises:
            UsageError: there are no targets, and alpha is not 0; a tensor has another shape or dtype, or `labels` are
                missing; `num_items_in_batch` is a number, and not above 0; or, by the first batch, the vocabulary is
                too small or the temperature leaves the cache's range.
        """
        if not isinstance(num_items_in_batch, Tensor | None) and not 0 < num_items_in_batch < math.inf:
            raise UsageError(f"num_items_in_batch {num_items_in_batch} is not a number of tokens above 0")
        if unknown := sorted(fields.keys() - {*FIELDS}):
            raise TypeError(f"a Student takes no tensor '{unknown[0]}'; it takes {', '.join(FIELDS)}")
        if batch is None:
            batch = self._batch({name: each for name, each in fields.items() if each is not None})
        rows = batch.rows()
        normalizer = rows.mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        validates = not (self.training or torch.is_grad_enabled())
        hidden_ND, states = (self.hidden_eager(batch), []) if validates else self._hidden(self.backbone, batch)
        states, balance = states[: len(self.layers)], states[len(self.layers) :]
        output: LossOutput = self.loss(
            hidden_ND,
            self.model.head,
            rows.labels,
            rows.mask,
            rows.targets,
            vocab_size=self.vocab_size,
            normalizer=normalizer,
            compile=self.compile_objective,
        )
        if self.hidden_loss is not None and not validates:
            distance = self.hidden_loss(states, batch.states, rows.mask)
            loss = output.loss + per_token(self.hidden_weight * distance, normalizer)
            output = output._replace(loss=loss, hidden=distance.detach().to(output.hidden.dtype))
        if balance:
            # not linear in the tokens, of which masked ones count too: a step's is the mean over its micro-batches,
            # by their unmasked tokens, and changes a little with their size
            routing = balance[0].float() * rows.mask.sum()
            loss = output.loss + per_token(self.router_weight * routing, normalizer)
            output = output._replace(loss=loss, router=routing.detach().to(output.router.dtype))
        if self.training:
            return output
        loss = per_token(output.ce, normalizer).to(output.loss.dtype)
        if not validates:
            return output._replace(loss=loss + (output.loss - output.loss.detach()))
        size = batch.loss_mask.shape[1]
        if rows.targets is not None and rows.targets.parts:
            rows = replace(rows, targets=None)
        sums = []
        for part in (slice(start, start + size) for start in range(0, len(rows.labels), size)):
            own = measure(hidden_ND[part], self.model.head, rows[part], vocab_size=self.vocab_size)
            sums.append(own.vector())
        rows_BM = torch.tensor(sums, dtype=torch.float64, device=loss.device)
        return EvaluationOutput(*output._replace(loss=loss), rows_BM)  # type: ignore[call-arg,return-value]

    def _batch(self, fields: dict[str, Tensor]) -> Batch:
        """Make the batch of named tensors. UsageError: see `forward`."""
        tokens = _checked(fields.get("tokens"), fields.get("loss_mask"))
        if "vocabulary" in fields and "labels" not in fields:
            raise UsageError(
                "the batch has no labels: transformers.Trainer takes them out for label_smoothing_factor and "
                "compute_loss_func, which need logits that a Student does not make; leave both out, and subclass "
                "compute_loss for another loss"
            )
        self._check_first(tokens, fields.get("vocabulary"), fields.get("temperature_range"))
        left = ("labels", "vocabulary", "temperature_range")
        return self._collator.batch({name: each for name, each in fields.items() if name not in left})

    def _check_first(self, tokens: Tensor, vocabulary: Tensor | None, temperature_range: Tensor | None) -> None:
        """Compare model and temperature with the data, once: reading a tensor waits for a GPU."""
        if "data" in self._checked:
            return
        if vocabulary is not None:
            cached, used = vocabulary[0].tolist()
            refuse_vocabulary(self.model.vocab_size, cached, used)
        elif (token := int(tokens.max())) >= self.model.vocab_size:
            raise UsageError(f"the batch has the token {token}, and the model a vocabulary of {self.model.vocab_size}")
        if temperature_range is not None:
            low, high = temperature_range[0].tolist()
            lowest, highest = self.temperature.reach
            if not low <= lowest <= highest <= high:
                used = f"T = {lowest:g}" if lowest == highest else f"T from {lowest:g} to {highest:g}"
                raise UsageError(
                    f"the temperature ({used}) leaves the cache's range of {low:.3g} to {high:.3g}; choose it, its end "
                    "or its bounds inside"
                )
        self._checked.add("data")

    def total(self, sums: LossOutput, temperature: Tensor) -> Tensor:
        """Return the total loss in fp64 of the tokens in `sums`, at this temperature."""
        alpha: Any = self.loss.alpha.value()
        if isinstance(alpha, Tensor):  # of each member
            ce, kd = sums.members[:, :2].unbind(1)
            loss = joined(ce, kd, alpha, alpha * temperature.double() ** 2).sum()
        else:
            ce, kd = sums.ce.double() - sums.ce_written.double(), sums.kd.double() - sums.kd_written.double()
            loss = joined(ce, kd, alpha, alpha * temperature.double() ** 2)
            loss = loss + alpha * sums.ce_alone.double()
        loss = loss + temperature.double() ** 2 * sums.kd_written.double()
        if self.hidden_loss is not None:
            loss = loss + self.hidden_weight * sums.hidden.double()
        return loss + self.router_weight * sums.router.double() if self.router_weight else loss

    def measure(self, batches: Iterable[Batch | Mapping[str, Tensor]], passes: float = 1.0) -> dict[str, float]:
        """Measure by text that nothing trains on what `alpha="auto"` follows (`objective.alpha`), and return it.

        Args:
            batches: as `forward` takes them, 2,048 unmasked tokens or more; of several ranks each gives its part.
            passes: how often training went over its text so far.

        Returns:
            loss, teacher_loss and kl, nats per token, and tokens; share, posterior and gap; and alpha as it is now.

        Raises:
            UsageError: alpha is fixed.
        """
        alpha = self.loss.alpha
        if not isinstance(alpha, MeasuredAlpha):
            raise UsageError("measure has no effect at a fixed alpha; make the loss with alpha='auto'")
        given = (each if isinstance(each, Batch) else self._batch({**each}) for each in batches)
        with evaluating(self):
            found = measured(self, given, lambda each: all_reduce_sum(each.to(self.device)).cpu())
        assert found is not None
        if (line := too_few(found.tokens)) and not alpha.measured:
            warnings.warn(line, stacklevel=2)
        alpha.trained.copy_(all_reduce_sum(alpha.trained) / world_size())
        alpha.passes = [passes]
        alpha.observe([found])
        return found.figures(float(alpha.gaps[0])) | {"alpha": alpha.largest()}

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """Run without compiled graphs in the block: hooks are not called in a graph, and rare forwards need none."""
        before = self.backbone, self.compile_objective
        self.backbone = self._backbone
        self.compile_objective = False
        try:
            with self.compiled.plain() if self.compiled else contextlib.nullcontext():
                yield
        finally:
            self.backbone, self.compile_objective = before

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a forward runs in its mode."""
        return autocast(self.mode, self.device)

    @contextlib.contextmanager
    def decoding(self) -> Iterator["Decoder"]:
        """Yield the student as `models.generate` takes it: in evaluation mode within the block, and never quantised.

        Every rank enters it with a sharded student, and takes as many steps.
        """

        @contextlib.contextmanager
        def inside() -> Iterator[None]:
            with self.switch.at("high"), self.autocast():
                yield

        from kdtrain.models.generate import decoding

        try:
            # each length would compile a graph of its own
            with evaluating(self), self.eager(), decoding(self.model, self.vocab_size, inside) as next_logits:
                yield next_logits
        finally:
            reshard(self.model)

    def hidden_eager(self, batch: Batch) -> Tensor:
        """Return the backbone's output for a micro-batch, [B*T, D], without a compiled graph.

        Validation is rare, and its own graph would cost half a minute. It is never quantised, as the exported student.
        """
        with self.switch.at("high"), self.eager():
            return self._hidden(lambda *inputs: (self.model(*inputs), []), batch)[0]

    @torch.no_grad()
    def label_logprobs(self, tokens_BT1: Tensor) -> Tensor:
        """Return log p [B, T] of the labels at T = 1, fp32, by the forward of training in evaluation mode."""
        tokens_BT1 = tokens_BT1.to(self.device)
        mask_BT = torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
        batch = Batch(tokens_BT1, mask_BT, torch.zeros_like(tokens_BT1[:, 1:]), None)
        with evaluating(self):
            hidden_ND = self.hidden_eager(batch)
        head = self.model.head.gathered()
        found = [
            head.take(z_RV, own.labels[:, None])[:, 0] - head.log_sum_exp(z_RV)
            for _, z_RV, own in chunks(hidden_ND, head, batch.rows(), self.vocab_size)
        ]
        return torch.cat(found).float().view(mask_BT.shape)

    def _backbone(self, tokens_BT: Tensor, segments_BT: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        """Return the hidden states, and the states of the hidden-state loss's layers; in training the router's loss."""
        balance = self.training and self.router_weight > 0
        if self.layers or balance:
            return self.model(tokens_BT, segments_BT, self.layers, balance)
        return self.model(tokens_BT, segments_BT), []

    def _hidden(
        self, backbone: Callable[..., tuple[Tensor, list[Tensor]]], batch: Batch
    ) -> tuple[Tensor, list[Tensor]]:
        with autocast(self.mode, batch.tokens.device):
            hidden_BTD, states = backbone(batch.tokens[:, :-1], batch.segments if self.document_mask else None)
        if self.model.fused:
            # Many models end in a norm that returns fp32 under autocast; the head still computes in the mode's dtype.
            hidden_BTD = hidden_BTD.to(head_dtype(self.mode) or hidden_BTD.dtype)
        return rearrange(hidden_BTD, "B T D -> (B T) D"), [
            rearrange(each, "B T D -> (B T) D") if each.ndim else each for each in states
        ]


_OPTIONAL = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in FIELDS]
_STATED = [each for each in inspect.signature(Student.forward).parameters.values() if each.name != "fields"]
# transformers.Trainer passes the columns of a data set that the signature names
Student.forward.__signature__ = inspect.Signature([*_STATED, *_OPTIONAL])  # type: ignore[attr-defined]

_OF_THE_MODEL = "model.model."
"""What the names of a model's parameters begin with in a student."""


def _from_names_of_the_model(student: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept a state dict with the model's own names, as `save_pretrained` writes it."""
    names = (*student.named_parameters(remove_duplicate=False), *student.named_buffers(remove_duplicate=False))
    own = {f"{prefix}{name}" for name, _ in names}
    for name in [each for each in state if each not in own]:
        if (full := f"{prefix}{_OF_THE_MODEL}{name.removeprefix(prefix)}") in own:
            state[full] = state.pop(name)


def _checked(tokens: Tensor | None, loss_mask: Tensor | None) -> Tensor:
    """Return the tokens. UsageError: tokens or mask are missing, or are not [B, T+1] int64 and [B, T] bool."""
    for name, tensor in (("tokens", tokens), ("loss_mask", loss_mask)):
        if not isinstance(tensor, Tensor):
            raise UsageError(f"the batch has no tensor '{name}'; make batches by collate, of a cache's sequences")
    assert tokens is not None and loss_mask is not None
    if tokens.ndim != 2 or tokens.dtype != torch.int64:
        raise UsageError(f"tokens are {tokens.dtype} {list(tokens.shape)}; give int64 [B, T+1]")
    size, length = tokens.shape
    if loss_mask.shape != (size, length - 1) or loss_mask.dtype != torch.bool:
        found = f"loss_mask is {loss_mask.dtype} {list(loss_mask.shape)}"
        raise UsageError(f"{found}; give bool [{size}, {length - 1}], a position for each token but the first")
    return tokens


def _tied(student: nn.Module) -> set[str]:
    """Return the second and further names of tied parameters."""
    every = {name for name, _ in student.named_parameters(remove_duplicate=False)}
    return every - {name for name, _ in student.named_parameters()}


def _without_tied(student: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    """Save a tied weight under one name, as safetensors requires."""
    for name in _tied(student):
        state.pop(f"{prefix}{name}", None)


def _tied_are_not_missing(student: nn.Module, keys: Any) -> None:
    """Accept a state dict with one name of a tied weight."""
    tied = _tied(student)
    keys.missing_keys[:] = [key for key in keys.missing_keys if key not in tied]
