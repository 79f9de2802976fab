"""Samples that an inference engine takes from its own logits: what a request and its answer hold.

A server in whose environment kdtrain is installed (`vllm_plugin`) answers a request that names a grid of
samples with what a cache of samples alone keeps, in place of the most likely entries, through the same API:

    request    "prompt_logprobs": 0, "vllm_xargs": {"kdtrain_samples": 50, "kdtrain_seed": 0,
               "kdtrain_split": "train", "kdtrain_row": 17, "kdtrain_first": 0}
    answer     "prompt_logprobs": [null, {"LABEL": {"logprob": log p, "rank": RECEIPT, "decoded_token": TEXT}}, ...]

TEXT is three numbers and the entries, `SLOPE MEAN DEVIATION ID:COUNT ID:COUNT ID ...`: E[log p], mean and standard
deviation of log p over the vocabulary, and how often each entry was drawn, where not once; `broken` where the logits
have no distribution. That is a sixth of the bytes that 16 entries take as JSON objects.

The receipt is a negative number, which no rank is, made of the grid and the position: an answer that has the right
ones was sampled by this code, at these points, for these positions. So an answer is found out of a server that lost the
plugin, of a proxy that mixed two requests up, or of a prompt of which a part came from a prefix cache.

The engine's arithmetic is the codec's, on the engine's logits: what it rounds (bf16, quantised weights) is rounded
here too.

What it gives up: only samples alone, and only numbers with seven digits.

Shape suffixes: N positions, D samples, V vocabulary, T positions of a prompt, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

import msgspec
import numpy as np
from msgspec import Meta

from kdtrain.cache.format.spec import CodecSpec
from kdtrain.files import typed

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
"""Of request, receipt and answer together."""
_LONGEST_ROW = 2**20  # positions: the chances of a row are hashed from its beginning, in the engine's own time
_CELLS = 2**24  # logits that a GPU encodes at a time: an engine leaves little memory
_NUMBERS = 3  # slope, mean and deviation
_BROKEN = "broken"
_MOST_LOGPROB = 1e-3  # 0, and what rounding adds
_LEAST_LOGPROB = -1e4  # as `objective.targets.FLOOR`: what is less likely counts as impossible, and in no number


class SampleRequest(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename=lambda name: f"kdtrain_{'samples' if name == 'number' else name}",
):
    """The samples of one prompt, which is a row of a cache or a part of one."""

    number: Annotated[int, Meta(ge=1, le=255)]
    """Samples a position."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
    split: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]
    row: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    """Number of the sequence in the split."""
    first: Annotated[int, Meta(ge=0, le=_LONGEST_ROW)] = 0
    """Position in the row of the prompt's first token."""

    def to_args(self) -> dict[str, str | int]:
        """Return the request's `vllm_xargs`."""
        return dict(msgspec.to_builtins(self))

    @classmethod
    def from_args(cls, args: Mapping[str, Any] | None) -> Self | None:
        """Read a request from its `vllm_xargs`, the inverse of `to_args`; return None without any of its keys.

        ValueError: some keys are missing, or wrong.
        """
        given = {key: value for key, value in (args or {}).items() if key.startswith("kdtrain_")}
        try:
            return typed(given, cls) if given else None
        except ValueError as error:
            keys = ", ".join(field.encode_name for field in msgspec.structs.fields(cls))
            raise ValueError(f"kdtrain's samples are requested by {keys} together: {error}") from None

    def points(self, start: int, stop: int) -> np.ndarray:
        """Return the points fp64 [N, D] of the prompt's positions `start` to `stop`."""
        from kdtrain.cache.format.codec import draw_points

        # Only these: a grid from the row's beginning could take the memory of a server that others use.
        return draw_points(self.seed, self.split, self.row, self.first + stop, self.number, start=self.first + start)

    def receipts(self, start: int, stop: int) -> np.ndarray:
        """Return the receipts int64 [N] in [-2**30, -1], which show that these positions were sampled."""
        from kdtrain.cache.format.codec import uniforms

        purpose = f"receipt {VERSION} {self.number} grid"
        return -1 - (uniforms(purpose, self.seed, self.split, self.row, self.first + stop)[self.first + start :] >> 2)


def sample(logits_NV: Tensor, labels_N: Tensor, request: SampleRequest, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the samples of the prompt's positions from `start` on: ids int32 and numbers fp32 [N, C], receipts [N].

    Columns: the label and its log p, three numbers under the label's id, then the entries and their counts, with the
    label and 0 in the columns left over. A position without a distribution has NaN for the label's log p.

    logits_NV: any float dtype and device. labels_N: the tokens that followed.
    """
    import torch

    from kdtrain.cache.format.codec import encode_on_device

    stop = start + len(labels_N)
    device = logits_NV.device
    spec = CodecSpec(kind="sparse", vocab_size=logits_NV.shape[1], num_samples=request.number)
    broken_N = ~logits_NV.amax(-1).isfinite()
    labels_N = labels_N.to(device, torch.int64)
    if broken_N.any():
        logits_NV = logits_NV.masked_fill(broken_N[:, None], 0.0)
    cells = _CELLS if logits_NV.is_cuda else None
    # Not compiled: what the engine compiles, and when, is its own affair.
    kept = encode_on_device(logits_NV, labels_N, spec, request.points(start, stop), compile=False, cells=cells)
    numbers = [kept["label_logprob"].masked_fill(broken_N, torch.nan), kept["tail"][:, 1]]
    numbers += [kept["logit_mean"], kept["logit_std"]]
    ids_ND = torch.where(kept["counts"] == 0, labels_N[:, None], kept["ids"])
    ids_NC = torch.cat([labels_N[:, None].expand(-1, 1 + _NUMBERS), ids_ND], -1)
    numbers_NC = torch.cat([torch.stack(numbers, -1), kept["counts"].float()], -1)
    receipts_N = torch.from_numpy(request.receipts(start, stop)).to(device)
    return ids_NC.int(), numbers_NC, receipts_N.int()


def is_sampled(receipts_N: Tensor) -> bool:
    """Return True for the third tensor of `sample`, False for ranks."""
    return bool(receipts_N.numel()) and bool((receipts_N < 0).all())


def entries(ids_NC: Tensor, numbers_NC: Tensor, receipts_N: Tensor) -> Iterator[tuple[int, float, int, str]]:
    """Yield label, log p of it, receipt and text of each position, from what `sample` made."""
    rows = zip(ids_NC.tolist(), numbers_NC.tolist(), receipts_N.tolist(), strict=True)
    for ids, numbers, receipt in rows:
        if math.isnan(numbers[0]):
            yield ids[0], 0.0, receipt, _BROKEN
            continue
        words = [f"{value:.7g}" for value in numbers[1 : 1 + _NUMBERS]]
        drawn = zip(ids[1 + _NUMBERS :], numbers[1 + _NUMBERS :], strict=True)
        words += [f"{each}:{int(count)}" if count > 1 else f"{each}" for each, count in drawn if count]
        yield ids[0], float(f"{numbers[0]:.7g}"), receipt, " ".join(words)


def read_samples(
    answer: Sequence[Mapping[int, Any] | None], tokens: Sequence[int], request: SampleRequest, spec: CodecSpec
) -> dict[str, np.ndarray]:
    """Read an answer's `prompt_logprobs` into the arrays [T, ...] that a cache keeps (`codec.encode`).

    Log p of the entries, which a cache does not keep either, is log (count / D), moved as its reader moves it.

    Args:
        answer: one position for each token, its entry with logprob, rank and decoded_token; the first is None.
        tokens: the prompt that was sent, T + 1 tokens.
        spec: samples alone, as many as the request's.

    Raises:
        ValueError: the server's own top-k, or samples of another grid, row or position, which have another receipt;
            samples that cannot be, or a position without a distribution.
    """
    assert spec.counts_only and spec.num_samples == request.number, "another codec than the request's"
    length = len(tokens) - 1
    number = spec.num_samples
    if len(answer) != length + 1:
        raise ValueError(f"prompt_logprobs has {len(answer)} positions, the prompt {length + 1} tokens")
    numbers_T = np.zeros((length, 1 + _NUMBERS))
    ids_TD = np.full((length, number), spec.absent, spec.id_dtype)
    counts_TD = np.zeros((length, number), np.uint8)
    receipts_T = request.receipts(0, length).tolist()
    for t, (listed, label, receipt) in enumerate(zip(answer[1:], tokens[1:], receipts_T, strict=True)):
        found = listed.get(int(label)) if listed is not None and len(listed) == 1 else None
        if found is None or found.rank != receipt:
            raise ValueError(
                f"position {t} not sampled by kdtrain as asked: is kdtrain installed where the server runs, and "
                "vLLM of a version that its plugin knows? The server's log says so at its start"
            )
        if found.decoded_token == _BROKEN or not found.logprob <= _MOST_LOGPROB:  # NaN is not either
            raise ValueError(f"the model has no distribution at position {t} (NaN or infinite logits)")
        try:
            numbers_T[t, 1:], ids, counts = _parsed(found.decoded_token or "", spec)
        except ValueError:
            raise ValueError(f"the samples of position {t} cannot be read: {found.decoded_token!r}") from None
        numbers_T[t, 0] = max(found.logprob, -1e30)
        ids_TD[t, : len(ids)], counts_TD[t, : len(ids)] = ids, counts
    drawn_TD = counts_TD > 0
    shares_TD = np.log(counts_TD / number, where=drawn_TD, out=np.zeros((length, number)))
    moved_T = numbers_T[:, 1] - (counts_TD * shares_TD).sum(-1) / number
    kept = {
        "logprobs": np.where(drawn_TD, shares_TD + moved_T[:, None], np.nan),
        "label_logprob": numbers_T[:, 0],
        "tail": np.stack([np.zeros(length), numbers_T[:, 1]], -1),  # log of all mass, and E[log p]
        "logit_mean": numbers_T[:, 2],
        "logit_std": numbers_T[:, 3],
    }
    arrays = {name: values.astype(np.float32) for name, values in kept.items()}
    return {**arrays, "ids": ids_TD, "counts": counts_TD}


def _parsed(text: str, spec: CodecSpec) -> tuple[list[float], list[int], list[int]]:
    """Parse slope, mean and deviation, ids and counts in a text. ValueError: they cannot be."""
    words = text.split(" ", _NUMBERS + spec.num_samples)
    numbers = [float(word) for word in words[:_NUMBERS]]
    pairs = [word.partition(":") for word in words[_NUMBERS:]]
    ids, counts = [int(each) for each, _, _ in pairs], [int(count or 1) for _, _, count in pairs]
    if len(numbers) < _NUMBERS or not all(_LEAST_LOGPROB <= each <= _MOST_LOGPROB for each in numbers[:2]):
        raise ValueError
    if not 0 <= numbers[2] <= -_LEAST_LOGPROB:
        raise ValueError
    if len(set(ids)) < len(ids) or not all(0 <= each < spec.vocab_size for each in ids):
        raise ValueError
    if min(counts, default=0) < 1 or sum(counts) != spec.num_samples:
        raise ValueError
    return numbers, ids, counts
