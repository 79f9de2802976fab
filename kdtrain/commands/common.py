"""Parts that several commands share: packed text, a teacher as a function, results as a table or as JSON."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from einops import rearrange
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerFast

from kdtrain.cache.manifest import tokenizer_digest
from kdtrain.config import DataConfig
from kdtrain.data.corpus import documents
from kdtrain.data.packing import PackedRow, pack
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.models.head import OutputHead, SplitModel, split
from kdtrain.models.loading import load_teacher, load_tokenizer, max_positions
from kdtrain.models.spec import ModelSpec
from kdtrain.monitor.progress import log
from kdtrain.objective.matmul import wide_product
from kdtrain.parallel.parallelize import reshard
from kdtrain.precision.compiled import CompiledLayers
from kdtrain.precision.modes import autocast
from kdtrain.ranks import is_main

Teacher = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
T = TypeVar("T")
TeacherLayers = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, list[torch.Tensor]]]


def rows(
    data: DataConfig, split_name: str, tokenizer: PreTrainedTokenizerFast, limit: int | None
) -> Iterator[PackedRow]:
    """Yield the first `limit` packed rows of a split."""
    assert data.data is not None
    texts = documents(
        data.data,
        split_name,
        text_column=data.text_column,
        messages_column=data.messages_column,
        streaming=data.streaming,
    )
    packed = pack(texts, tokenizer, data.seq_len, num_workers=data.num_workers, document_mask=data.document_mask)
    return itertools.islice(packed, limit)


def open_teacher(spec: ModelSpec, device: torch.device, mode: str) -> SplitModel:
    """Load a teacher in evaluation mode, without gradients, split into backbone and head."""
    model = load_teacher(spec, str(device))
    teacher = split(model.float() if mode == "fp32" else model)
    if not teacher.fused:
        log.info("teacher %s: output head not split off: %s", spec.name, teacher.reason)
    return teacher


def compiled_teacher(teacher: SplitModel) -> CompiledLayers:
    """Compile a teacher's layers, after it is sharded, without timing kernels: the same teacher gives the same bits."""
    return CompiledLayers(teacher, options={"deterministic": True})


def teacher_logits(
    teacher: SplitModel,
    device: torch.device,
    mode: str,
    head: OutputHead | None = None,
    compiled: CompiledLayers | None = None,
) -> Teacher:
    """Return a function tokens_BT, segments_BT | None -> logits_BTV in fp32, without gradients.

    head: the teacher's head, in fp32 and whole, where the teacher itself is sharded. compiled: its layers, if they are.

    The head's product ends in fp32: bf16 rounds a logit of 20 by up to 0.06 before the softmax.
    """
    hidden_states, head = teacher_hidden_states(teacher, device, mode, (), compiled), head or wide_head(teacher)

    def forward(tokens_BT: torch.Tensor, segments_BT: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            hidden_BTD = hidden_states(tokens_BT, segments_BT)[0]
            if head.weight is None or head.weight.dtype == torch.float32:
                return head(hidden_BTD)
            product_NV = wide_product(rearrange(hidden_BTD, "B T D -> (B T) D"), head.weight)
            product_NV = product_NV if head.bias is None else product_NV + head.bias
            return rearrange(head.shape(product_NV), "(B T) V -> B T V", T=tokens_BT.shape[1])

    return forward


def wide_head(teacher: SplitModel) -> OutputHead:
    """Return the teacher's output head without gradients, in fp32; 16-bit weights on a GPU keep their dtype.

    A GPU multiplies 16-bit numbers into an fp32 result at a tenth of the price of an fp32 product.
    """
    head = teacher.head
    weight, bias = (None if each is None else each.detach() for each in (head.weight, head.bias))
    weight = weight if weight is None or weight.is_cuda else weight.float()
    return dataclasses.replace(head, weight=weight, bias=None if bias is None else bias.float())


def teacher_hidden_states(
    teacher: SplitModel,
    device: torch.device,
    mode: str,
    layers: tuple[int, ...],
    compiled: CompiledLayers | None = None,
) -> TeacherLayers:
    """Return a function tokens_BT, segments_BT | None -> the input of `wide_head`, [B, T, D], and outputs of `layers`.

    In fp32, or on a GPU in the 16-bit dtype of the head if the backbone returns that. compiled: the teacher's layers,
    if they are.
    """
    weight = teacher.head.weight
    dtype = weight.dtype if weight is not None and weight.is_cuda else torch.float32

    def forward(tokens_BT: torch.Tensor, segments_BT: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        inputs = tokens_BT.to(device), None if segments_BT is None else segments_BT.to(device)
        with torch.no_grad(), autocast(mode, device):
            hidden_BTD, states = teacher.with_layers(*inputs, layers) if layers else (teacher(*inputs), [])
        reshard(teacher)
        return hidden_BTD if hidden_BTD.dtype == dtype else hidden_BTD.float(), states

    return forward if compiled is None else compiled.calling(forward)


def check_fits(model: SplitModel, name: str, seq_len: int, document_mask: bool) -> None:
    """Refuse sequences longer than a model's positions, and a document mask that it cannot apply."""
    longest = max_positions(model)
    if longest is not None and seq_len > longest:
        raise UsageError(f"--seq-len {seq_len} is beyond the {longest} positions of {name}; choose at most {longest}")
    if document_mask and not model.separates_documents:
        raise UsageError(f"{name} cannot keep packed documents apart; leave --document-mask out")


def digest_of(tokenizer: ModelSpec | Path | str | None) -> str | None:
    """Return the digest of the tokenizer of a spec, in a folder or on the hub; None for a model without one."""
    where = tokenizer.tokenizer or tokenizer.source if isinstance(tokenizer, ModelSpec) else tokenizer
    if where is None or (Path(where).is_dir() and not (Path(where) / "tokenizer.json").is_file()):
        return None
    return tokenizer_digest(load_tokenizer(tokenizer or where))


def read_checkpoint(find: Callable[[], Path], read: Callable[[Path], T]) -> T:
    """What `read` makes of the checkpoint that `find` names; again if a run that is training has removed that one.

    Raises:
        UsageError, RunError: those of `find`, and of `read` for a checkpoint that is still there.
    """
    while True:
        path = find()
        try:
            return read(path)
        except (RunError, OSError):
            if path.exists():
                raise


def checkpoint_at(path: Path) -> Path:
    """The folder of the checkpoint `path`, which may be a link. UsageError: a run that is training has removed it."""
    if not path.exists():
        raise UsageError(f"{path} was removed while it was read, by the run that is training; name a newer checkpoint")
    return path.resolve()


def show(title: str, table: Mapping[str, Any], as_json: bool) -> None:
    """Print a result on stdout, on rank 0: a table of two columns, or one JSON object."""
    if not is_main():
        return
    if as_json:
        print(json.dumps(finite(dict(table))))
        return
    shown = Table(title=literal(title, "table.title"), show_header=False, title_justify="left")
    shown.add_column()
    shown.add_column(overflow="fold")
    for name, value in table.items():
        shown.add_row(literal(name), literal(_text(value)))
    Console(soft_wrap=True).print(shown)


def literal(text: str, style: str = "") -> Text:
    """Return `text` for a table without control characters and without markup, which rich would interpret."""
    return Text("\n".join(map(printable, text.split("\n"))), style)


def _text(value: Any, inner: bool = False) -> str:
    """`value` as a cell: one line for each entry at the outer level, a single line inside."""
    if isinstance(value, Mapping):
        entries = [f"{name}{' ' if inner else ': '}{_text(each, True)}" for name, each in value.items()]
        return f"({', '.join(entries)})" if inner else "\n".join(entries)
    if isinstance(value, list | tuple):
        return (", " if inner else "\n").join(_text(each, True) for each in value) or "none"
    if isinstance(value, float):
        if abs(value) < 1e-3 or abs(value) >= 1e12:  # a perplexity may have 300 digits
            return f"{value:.4g}"
        return f"{value:,.4f}" if abs(value) < 1e5 else f"{value:,.0f}"
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)


def finite(value: Any) -> Any:
    """Return `value` with null for each non-finite number, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
