"""A teacher whose model is loaded here: the kind of every spec that names no other; and the student as its own.

The layers run in the requested mode, and the output head's product ends in fp32 in every mode, because bf16
rounds a logit of 20 by up to 0.06 before the softmax. While a run trains, the teacher returns hidden states and the
loss makes its logits a few rows at a time.

The output head is held beside the model and whole on each rank, also where the model is sharded or cut over tensor
ranks: no loss gathers it, each rank makes the logits of its own rows, and of its own columns where the student's head
is in parts. Tensor ranks that read different sequences compute one rank's after another's.

Shape suffixes: B sequences, T positions, N tokens (B*T), V vocabulary, D width.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from transformers import GenerationConfig

from kdtrain.cache.format.manifest import CacheSettings, WeightsCost
from kdtrain.cache.write.answers import ShardAnswers
from kdtrain.errors import UsageError, log
from kdtrain.models.adapters import adapters_off
from kdtrain.models.attention import use_cached_attention
from kdtrain.models.frozen import is_packed, pack, refuse_weights
from kdtrain.models.head import SplitModel, evaluating, layer_widths, split
from kdtrain.models.hub import opened
from kdtrain.models.loading import (
    adapted,
    check_fits,
    configuration,
    load_teacher,
    model_digest,
    refuse_long,
    vocabulary,
)
from kdtrain.models.output_head import HeadPart
from kdtrain.objective.batch import Batch
from kdtrain.objective.engine.matmul import wide_product
from kdtrain.objective.targets import OnlineTargets
from kdtrain.parallel.footprint import ModelFootprint, footprint_of
from kdtrain.parallel.layout import RankLayout
from kdtrain.parallel.memory_plan import USABLE
from kdtrain.parallel.parallelize import reshard, shard
from kdtrain.precision.compiled import CompiledLayers
from kdtrain.precision.modes import autocast, compiles_teacher
from kdtrain.teaching.teacher import OnlineTeacher, Writing, register_teacher
from kdtrain.teaching.writing import WrittenAnswers, refuse_other_logits


@register_teacher("local")
class LocalTeacher(OnlineTeacher):
    """A causal language model of transformers, in evaluation mode and without gradients."""

    model: SplitModel
    """Backbone and output head, once it is loaded."""
    head: HeadPart
    """Its output head in fp32; on a GPU, which multiplies 16-bit numbers into an fp32 result at a tenth of the price,
    16-bit weights keep their dtype."""

    _compiled: CompiledLayers | None = None
    _cut: tuple[RankLayout, int] | None = None
    _in_turns: Callable[..., Any] | None = None
    """Calls the model of tensor ranks, which may have sequences of their own."""

    def __str__(self) -> str:
        how = f"{self.mode} on {self.device}"
        if self._cut is not None:
            how += f", cut over {self._cut[0].tensor_size} ranks"
        elif self.sharded:
            how += ", sharded"
        if self._compiled:
            how += ", compiled"
        return f"{self.name} ({how})"

    @property
    def identity(self) -> Mapping[str, Any]:
        """Spec, digest and number formats; compiled layers round differently, so that they count too."""
        found = {"spec": self.name, "weights_digest": self.digest, "dtype": self.spec.dtype, "precision": self.mode}
        attention = "sdpa" if self.spec.attention == "auto" else self.spec.attention
        weights = {} if self.spec.weights is None else {"weights": self.spec.weights}
        file = opened(self.spec.source)
        found |= {"attention": attention, **({} if file is None else file.facts)}
        return found | ({"compiled": True} if self._compiled else {}) | weights

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the weights, taken while they are whole and not packed."""
        return model_digest(self.model)

    @property
    def vocab_size(self) -> int:
        """Rows of the output head; before the model is loaded by its configuration."""
        return self.model.vocab_size if hasattr(self, "model") else vocabulary(self.spec)

    def footprint(self, seq_len: int) -> ModelFootprint | None:
        """Measure the model's footprint, from its configuration alone."""
        self._refuse_weights()
        how = {"seq_len": seq_len, "mode": self.mode, "on_gpu": self.device.type == "cuda"}
        found = footprint_of(self.spec, vocab_size=None, trained=False, **how)
        if found is None or self._cut is None:
            return found
        return dataclasses.replace(found.part(self._cut[0].tensor_size, None), vocabulary=found.vocabulary)

    def cut(self, layout: RankLayout, alike: int) -> None:
        """Cut the layers and the embedding by the plan of transformers; each rank keeps the whole output head."""
        from kdtrain.parallel.tensor import TEACHER, refuse_plan

        if self.spec.weights is not None:
            raise UsageError(f"{TEACHER} cannot cut --teacher-weights {self.spec.weights}; leave one of them out")
        refuse_plan(configuration(self.spec, None), self.name, layout.tensor_size, self.vocab_size, TEACHER)
        self._cut = (layout, alike)
        self.sharded = layout.tensor_size > alike

    def load(self, sharded: bool = False) -> None:
        """Load the model; on the CPU if it is cut, sharded or packed later: it may be too large for one device."""
        self._refuse_weights()
        later = sharded or self.spec.weights is not None or self._cut is not None
        model = load_teacher(self.spec, "cpu" if later else str(self.device))
        self.use(split(model.float() if self.mode == "fp32" else model))
        if not self.model.fused:
            log.info("teacher %s: output head not split off: %s", self.name, self.model.reason)

    def _refuse_weights(self) -> None:
        if self.spec.weights is not None:
            refuse_weights(self.spec.weights, "--teacher-weights", self.device)

    def use(self, model: SplitModel) -> None:
        self.model = model
        head = model.head
        weight, bias = (None if each is None else each.detach().to(self.device) for each in (head.weight, head.bias))
        weight = weight if weight is None or weight.is_cuda else weight.float()
        self.head = dataclasses.replace(head, weight=weight, bias=None if bias is None else bias.float())

    def pack(self, rows: Iterable[Batch], *, document_mask: bool = False) -> None:
        """Pack the weights once.

        The loss with the whole weights is measured on the device if they fit there, else on a CPU, on fewer rows.
        """
        if (kind := self.spec.weights) is None or is_packed(self.model):
            return
        _ = self.digest  # of the whole weights
        kept = list(rows)
        size = sum(each.nbytes for each in self.model.parameters())
        device = self.device
        if device.type == "cuda" and size > USABLE / 2 * torch.cuda.mem_get_info(device)[0]:
            self.device = torch.device("cpu")
            kept = kept[:1]
        self.use(self.model.to(self.device))
        whole = self._loss(kept, document_mask) if kept else None
        self.device = device
        pack(self.model.model, kind, fused=self.model.fused, device=device)
        self.use(self.model)
        if whole is not None:
            loss = self._loss(kept, document_mask)
            rows_, tokens = sum(len(each.tokens) for each in kept), sum(int(each.loss_mask.sum()) for each in kept)
            self.cost = WeightsCost(
                weights=kind, whole_loss=whole, loss=loss, cost=loss - whole, sequences=rows_, tokens=tokens
            )

    def _loss(self, rows: Iterable[Batch], document_mask: bool) -> float:
        """Return the cross-entropy of the text, nats per token."""
        total = 0.0
        tokens = 0
        for batch in rows:
            logits_BTV = self.logits(batch.tokens[:, :-1], batch.segments if document_mask else None)
            labels_BT1, mask_BT = (each.to(logits_BTV.device) for each in (batch.tokens[:, 1:, None], batch.loss_mask))
            loss_BT = logits_BTV.logsumexp(-1) - logits_BTV.gather(-1, labels_BT1)[..., 0]
            total, tokens = total + float(loss_BT[mask_BT].double().sum()), tokens + int(mask_BT.sum())
        return total / max(tokens, 1)

    def check(self, seq_len: int, document_mask: bool) -> None:
        """Refuse sequences beyond the model's positions, and a document mask that it cannot apply."""
        check_fits(self.model, self.name, seq_len, document_mask)

    def prepare(self, *, mesh: Any = None, compile: bool = False) -> None:
        """Cut and shard the model, then compile its layers on a GPU: without timing kernels, which could change the
        bits.
        """
        self.pack(())
        if mesh is not None or self._cut is not None:
            _ = self.digest  # of the whole weights
        if self._cut is not None:
            from kdtrain.parallel import tensor

            how: dict[str, Any] = {"vocab_size": self.vocab_size, "sequence": False, "option": tensor.TEACHER}
            tensor.apply(self.model, self._cut[0], self.device, **how)
            if self.sharded:
                self._in_turns = tensor.in_turns(*self._cut)
        if mesh is not None:
            self.sharded = True
            shard(self.model, mesh)
        if compiles_teacher(compile, self.device, self._cut is not None):
            self._compiled = CompiledLayers(self.model, options={"deterministic": True})

    def hidden_states(
        self, tokens_BT: Tensor, segments_BT: Tensor | None, layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the input of `head`, [B, T, D], and outputs [B, T, D] of `layers`, without gradients.

        In fp32, or on a GPU in the 16-bit dtype of the head if the backbone returns that.
        """
        inputs = tokens_BT.to(self.device), None if segments_BT is None else segments_BT.to(self.device), layers
        forward = CompiledLayers.calling(self.model.__call__)  # of one that teaches itself the layers are compiled too
        if self._in_turns is not None:
            forward = partial(self._in_turns, forward)
        with torch.no_grad(), autocast(self.mode, self.device):
            hidden_BTD, states = forward(*inputs) if layers else (forward(*inputs), [])
        reshard(self.model)
        return self._as_head(hidden_BTD), states

    def _as_head(self, hidden_BTD: Tensor) -> Tensor:
        dtype = torch.float32 if self.head.weight is None else self.head.weight.dtype
        return hidden_BTD if hidden_BTD.dtype == dtype else hidden_BTD.float()

    def logits(self, tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
        """Return logits [B, T, V] in fp32."""
        hidden_BTD, _ = self.hidden_states(tokens_BT, segments_BT)
        with torch.no_grad():
            return hidden_BTD if self.head.weight is None else self.head.shape(self._product(hidden_BTD))

    def _product(self, hidden_BTD: Tensor) -> Tensor:
        """Return the product with the weight of `head`, bias included, in fp32."""
        weight, bias = self.head.weight, self.head.bias
        assert weight is not None
        if weight.dtype == torch.float32:
            return F.linear(hidden_BTD.float(), weight, bias)
        product_NV = wide_product(rearrange(hidden_BTD, "B T D -> (B T) D"), weight)
        product_NV = product_NV if bias is None else product_NV + bias
        return rearrange(product_NV, "(B T) V -> B T V", T=hidden_BTD.shape[1])

    def write(self, how: Writing) -> None:
        """Continue prompts from here on; UsageError: it is sharded, or its model cannot."""
        if self.sharded:
            raise UsageError(
                f"{self.name} is sharded over the ranks, and --generate needs it whole on each; serve it, and give "
                "--teacher-server"
            )
        self.writing = how
        use_cached_attention(self.model.model)
        refuse_other_logits(self._generate, lambda tokens_BT: self.logits(tokens_BT, None), self.name, self.vocab_size)

    def answers(self, settings: CacheSettings) -> ShardAnswers:
        """Return answers from a forward for each batch, or from the text that the teacher writes into it."""
        if self.writing is None:
            return super().answers(settings)
        return WrittenAnswers(self._generate, self.writing, settings, self.logits)

    def _generate(self, prompts_BW: Tensor, *, positions: int, attention_mask: Tensor, **options: Any) -> None:
        """Call the model's `generate` with none of its own settings, and logits as `logits` rounds them."""
        model: Any = self.model.model
        own = model.generation_config

        def inside(_: Any, given: Any, named: dict[str, Any]) -> Any:
            if (place := named.get("position_ids")) is not None:
                named["position_ids"] = place.clamp(max=positions)
            return given, named

        def product(hidden_BTD: Tensor) -> Tensor:
            with torch.autocast(self.device.type, enabled=False):
                return self._product(self._as_head(hidden_BTD))

        head = model.get_output_embeddings()
        hook = model.register_forward_pre_hook(inside, with_kwargs=True)
        if self.model.fused:
            head.forward = product
        model.generation_config = GenerationConfig()
        how = GenerationConfig(do_sample=False, use_cache=True, max_new_tokens=options.pop("max_new_tokens"))
        try:
            with torch.no_grad(), autocast(self.mode, self.device):
                placed = prompts_BW.to(self.device), attention_mask.to(self.device)
                model.generate(placed[0], attention_mask=placed[1], generation_config=how, **options)
        finally:
            hook.remove()
            if self.model.fused:
                del head.forward
            model.generation_config = own

    def targets(
        self, batch: Batch, vocab_size: int, *, document_mask: bool = False, layers: tuple[int, ...] = ()
    ) -> Batch:
        """Return `batch` with the hidden states from which the loss makes the logits."""
        segments_BT = batch.segments if document_mask else None
        hidden_BTD, states = self.hidden_states(batch.tokens[:, :-1], segments_BT, layers)
        labels_N = rearrange(batch.tokens[:, 1:], "B T -> (B T)")
        targets = OnlineTargets(rearrange(hidden_BTD, "B T D -> (B T) D"), labels_N, self.head, vocab_size)
        return dataclasses.replace(
            batch, targets=targets, states=tuple(rearrange(each, "B T D -> (B T) D") for each in states)
        )

    def layer_widths(self) -> list[int]:
        """Return D of the embedding and of each layer, found by a probe. UsageError: the model does not return them."""
        return layer_widths(self.model)


@register_teacher("self")
class SelfTeacher(LocalTeacher):
    """The student without its adapters.

    At no cost in memory. It is what the student was when the run began; where `--load` began with trained adapters, the
    base below these. The divergence then holds a student near its base while it learns from the text, as KL to a
    reference policy does, or is all that it learns, at another temperature (self-distillation, Born-Again Networks,
    arXiv 1805.04770).
    """

    @property
    def digest(self) -> str:
        """The digest of the frozen weights."""
        return self._digest

    def footprint(self, seq_len: int) -> ModelFootprint | None:
        """Measure the teacher's forward alone: the weights are the student's."""
        found = super().footprint(seq_len)
        return found and dataclasses.replace(found, parameters=0, in_layers=0, weight_bytes=4)

    def cut(self, layout: RankLayout, alike: int) -> None:
        """UsageError: it is the student, which is cut by --tensor-parallel."""
        raise UsageError("--teacher-tensor-parallel cannot cut --teacher self, which is the student; leave it out")

    def load(self, sharded: bool = False) -> None:
        """Do nothing: `meet` brings the weights."""

    def check(self, seq_len: int, document_mask: bool) -> None:
        """Refuse sequences beyond the student's positions, as of a prompt that the teacher alone reads."""
        refuse_long(configuration(self.spec, None), self.name, seq_len)

    def meet(self, student: SplitModel) -> None:
        """Use the student's backbone and, before it is sharded, its output head."""
        if not adapted(student):
            raise UsageError("--teacher self is the student without its adapters, and it has none; add --lora-rank")
        self._digest = student.base
        self.use(student)

    def prepare(self, *, mesh: Any = None, compile: bool = False) -> None:
        """Do nothing: the student is sharded and compiled; without its adapters it runs as it is."""

    def hidden_states(
        self, tokens_BT: Tensor, segments_BT: Tensor | None, layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Return what a local teacher returns; the student's mode does not change."""
        with evaluating(self.model), adapters_off(self.model):
            return super().hidden_states(tokens_BT, segments_BT, layers)
