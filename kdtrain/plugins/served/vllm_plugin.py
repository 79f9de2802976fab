"""vLLM answers requests that ask for kdtrain's samples: the plugin that vLLM loads where kdtrain is installed.

vLLM calls `register` at the start of each of its processes (entry point `vllm.general_plugins`). What a request
and its answer hold stands in `engine_samples`. Three places are extended, each by a function around
vLLM's own, which still handles all other requests:

    the front end checks a request        InputProcessor: a wrong one gets status 400 before it is queued
    the worker samples a prompt's logits  GPUModelRunner (version 1) or PromptLogprobsWorker (version 2 of the runner)
    the front end words the answer        LogprobsProcessor

A request's prompt is sampled in the steps that prefill it, however the scheduler cuts it into chunks and whatever else
is in the batch; the chunks meet when the last is there. A prompt that was preempted begins again. Logits are whole on
every rank of a tensor-parallel group: all compute the same, and the first answers. A prompt with `prompt_logprobs` does
not read the prefix cache; where one did all the same, positions are missing and the client refuses the answer.

vLLM changes from version to version, so this is installed in those that it was tested with (`TESTED`) and in no other:
there the server's log says so, requests are answered as if kdtrain were absent, and the client sees no receipt.

What it gives up: vLLM's front end in Rust, which loads no plugins, and prompts given as embeddings.
"""

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from kdtrain.plugins.served.engine_samples import SampleRequest, entries, is_sampled, sample

TESTED = ("0.32.0",)
_CHUNK = 1024  # positions whose logits are made at a time
_STATE = "kdtrain"  # attribute of vLLM's objects that holds ours

log = logging.getLogger("vllm.plugins.kdtrain")

Chunks = dict[int, tuple[Any, ...]]
"""What `sample` made of a prompt so far, by the first position of each chunk."""


def register() -> None:
    """Extend vLLM in this process; a second call does nothing."""
    import vllm

    if vllm.__version__.partition("+")[0] not in TESTED:
        tested = ", ".join(TESTED)
        log.warning("kdtrain's samples are off: tested with vLLM %s, and this is %s", tested, vllm.__version__)
        return
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    _extend(InputProcessor, "_validate_params", _check_request)
    _extend(LogprobsProcessor, "_update_prompt_logprobs", _word_answer)
    # The runners are not imported yet, and the front end never needs them.
    _extend(WorkerWrapperBase, "init_device", _extend_runner)


def _extend(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Put `around(original, self, ...)` in the place of a method, once."""
    original = getattr(owner, name)
    if hasattr(original, _STATE):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        return around(functools.partial(original, self), self, *args, **options)

    setattr(method, _STATE, True)
    setattr(owner, name, method)


def _check_request(original: Callable[..., Any], self: Any, params: Any, *args: Any, **options: Any) -> Any:
    found = original(params, *args, **options)
    try:
        wanted = SampleRequest.from_args(getattr(params, "extra_args", None))
        if wanted is not None and params.prompt_logprobs is None:
            raise ValueError("kdtrain's samples come in the place of prompt_logprobs: ask for 0 of them")
    except ValueError as error:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(str(error)) from None
    return found


def _wanted(params: Any) -> SampleRequest | None:
    """Read the request for samples of an engine's request; the front end has refused wrong ones."""
    try:
        return SampleRequest.from_args(params.extra_args)
    except ValueError:
        return None


def _word_answer(original: Callable[..., None], self: Any, tensors: Any) -> None:
    ids, numbers, receipts = tensors[:3]
    if not is_sampled(receipts):
        return original(tensors)
    from vllm.logprobs import Logprob

    for label, logprob, receipt, text in entries(ids, numbers, receipts):
        self.prompt_logprobs.append({label: Logprob(logprob=logprob, rank=receipt, decoded_token=text)})


def _extend_runner(original: Callable[..., None], self: Any) -> None:
    original()
    runner = type(self.worker.model_runner)
    owners = [owner for owner in runner.__mro__ if "_get_prompt_logprobs_dict" in vars(owner)]
    for owner in owners:
        _extend(owner, "_get_prompt_logprobs_dict", _version_1)
    version_2 = sys.modules.get("vllm.v1.worker.gpu.sample.prompt_logprob")
    if version_2 is not None:
        worker = version_2.PromptLogprobsWorker
        _extend(worker, "add_request", _add_request)
        _extend(worker, "remove_request", _remove_request)
        _extend(worker, "compute_prompt_logprobs", _version_2)
    if owners or version_2 is not None:
        log.info("kdtrain answers requests for samples (%s)", runner.__name__)
    else:
        log.warning("kdtrain's samples are off: it does not know the runner %s", runner.__name__)


def _sample_chunk(
    chunks: Chunks, wanted: SampleRequest, start: int, logits_of: Callable[..., Any], hidden_ND: Any, labels_N: Any
) -> None:
    """Add the prompt's positions from `start` on; position 0 begins the prompt anew."""
    if start == 0:
        chunks.clear()
    for first in range(0, len(labels_N), _CHUNK):
        logits_NV = logits_of(hidden_ND[first : first + _CHUNK])
        if logits_NV is not None:  # a rank that gets none does not answer either
            chunks[start + first] = sample(logits_NV, labels_N[first : first + _CHUNK], wanted, start + first)


def _answer(chunks: Chunks) -> Any:
    """Join the chunks of a prompt as vLLM's tensors, in as many columns as the position with most entries needs."""
    import torch
    from vllm.v1.outputs import LogprobsTensors

    if not chunks:
        return None
    parts = zip(*(chunks[start] for start in sorted(chunks)), strict=True)
    ids_NC, numbers_NC, receipts_N = (torch.cat(part).cpu() for part in parts)
    used = int((numbers_NC != 0).any(0).nonzero().max()) + 1
    return LogprobsTensors(ids_NC[:, :used].contiguous(), numbers_NC[:, :used].contiguous(), receipts_N)


def _version_1(original: Callable[..., Any], self: Any, hidden_ND: Any, scheduled: dict[str, int]) -> Any:
    """Wrap `GPUModelRunner._get_prompt_logprobs_dict`, which does not see the requests that are sampled."""
    import torch

    requested = {}
    # In this order, not a set's: making logits is a collective, and all ranks of a group must meet in it.
    for req_id in (each for each in self.num_prompt_logprobs if each in scheduled):
        request = self.requests[req_id]
        if request.prompt_token_ids is not None and (wanted := _wanted(request.sampling_params)) is not None:
            requested[req_id] = wanted
    if not requested:
        return original(hidden_ND, scheduled)
    held = {req_id: self.num_prompt_logprobs.pop(req_id) for req_id in requested}
    found = original(hidden_ND, scheduled)
    for req_id, wanted in requested.items():
        request = self.requests[req_id]
        prompt, start = request.prompt_token_ids, request.num_computed_tokens
        stop = start + scheduled[req_id]
        row = int(self.query_start_loc.np[self.input_batch.req_id_to_index[req_id]])
        labels_N = torch.tensor(prompt[start + 1 : stop + 1])
        chunks = vars(request).setdefault(_STATE, {})
        _sample_chunk(chunks, wanted, start, self.model.compute_logits, hidden_ND[row : row + len(labels_N)], labels_N)
        if stop < len(prompt):
            self.num_prompt_logprobs[req_id] = held[req_id]
        else:
            found[req_id] = _answer(chunks)
            chunks.clear()
    return found


def _add_request(original: Callable[..., None], self: Any, req_id: str, req_idx: int, params: Any) -> None:
    original(req_id, req_idx, params)
    wanted = _wanted(params) if self.uses_prompt_logprobs[req_idx] else None
    if wanted is not None:
        self.uses_prompt_logprobs[req_idx] = False
        vars(self).setdefault(_STATE, {})[req_id] = wanted, {}


def _remove_request(original: Callable[..., None], self: Any, req_id: str) -> None:
    original(req_id)
    vars(self).get(_STATE, {}).pop(req_id, None)


def _version_2(
    original: Callable[..., Any],
    self: Any,
    logits_of: Callable[..., Any],
    hidden_ND: Any,
    batch: Any,
    tokens: Any,
    computed: Any,
    lengths: Any,
) -> Any:
    """Wrap `PromptLogprobsWorker.compute_prompt_logprobs`, which does not see the requests that are sampled."""
    found = original(logits_of, hidden_ND, batch, tokens, computed, lengths)
    requested = vars(self).get(_STATE, {})
    for i, req_id in enumerate(batch.req_ids if requested else ()):
        if req_id not in requested:
            continue
        wanted, chunks = requested[req_id]
        place, start = int(batch.idx_mapping_np[i]), int(batch.num_computed_prefill_tokens_np[i])
        length = int(lengths[place])
        stop = start + int(batch.num_scheduled_tokens[i])
        if start >= length or length < int(batch.prefill_len_np[i]):  # it is answered already
            continue
        row = int(batch.query_start_loc_np[i])
        labels_N = tokens[place, start + 1 : min(stop + 1, length)]
        _sample_chunk(chunks, wanted, start, logits_of, hidden_ND[row : row + len(labels_N)], labels_N)
        if stop >= length:
            found = {**found, req_id: _answer(chunks)}
            chunks.clear()
    return found
