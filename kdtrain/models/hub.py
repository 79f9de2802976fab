"""Asking transformers and the hub for something, and saying in one line why it could not be had.

`transformers` reports what it cannot load by many types of exception of several lines, among warnings and
progress bars, and asks on stdin whether to run code that comes with a model. Importing this module turns those
off; `ask` makes a `UsageError` of one line of any exception. What went wrong in between, such as a lost
connection, is not told apart from what cannot be.
"""

import difflib
import errno
import logging
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast, dynamic_module_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import is_flash_attn_2_available

from kdtrain.errors import UsageError, panics_refused
from kdtrain.models.spec import ATTENTIONS, ModelSpec
from kdtrain.models.trust import refuse_code, refuse_foreign_tokenizer, refuse_impossible, refuse_large_files

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
# How long transformers waits for an answer on stdin. At 0 it does not ask, and refuses; some parts of composite
# models are built inside transformers, where nothing can be passed that says no.
dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0

# What transformers says, and what that means to the one who asked.
_EXPLANATIONS = {
    "model.safetensors": "no weights in safetensors there; other formats are not read, nothing is unpickled",
    "couldn't connect": "no such folder, and the hub cannot be reached; check the name and the network",
    "not a valid model identifier": "no such folder, and no such model on the hub; check the name",
    "custom code": "it brings its own code; if you trust that, set trust_remote_code = true in a TOML",
    "Unrecognized configuration class": "it is not a causal language model; take one that is",
    "Should have a `model_type` key": "its config.json has no model_type; fetch or export the model again",
    "not a valid JSON file": "its config.json is not valid JSON; fetch or export the model again",
    "FlashAttention2": "flash_attention_2 is not installed here; take attention = 'sdpa'",
    "backend tokenizer": "no tokenizer.json there; save its tokenizer as a fast one",
}

Answer = TypeVar("Answer")


def ask(source: str, load: Callable[[], Answer]) -> Answer:
    """Call `load`; raise what it raises as a `UsageError` of one line that begins with `source`.

    Out of memory and a full disk pass through: the same question may be answered elsewhere.
    """
    try:
        with panics_refused(f"{source}: cannot be loaded"):
            return load()
    except (torch.OutOfMemoryError, MemoryError, UsageError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise UsageError(f"{source}: {_explain(error)}") from error


def revision_of(spec: ModelSpec) -> str:
    """Branch, tag or commit on the hub."""
    return spec.revision or "main"


def attention_option(attention: str) -> str | None:
    """Return `attn_implementation` for transformers, of a spec's or a checkpoint's `attention`. Raises `UsageError`.

    None for sdpa: asked for sdpa, it fails where a model has none; asked for nothing, it takes eager there.
    flash_attention_2 that is not installed is refused here, because transformers may fetch another one from the hub.
    """
    if attention not in ATTENTIONS:
        raise UsageError(f"attention = {attention!r} is unknown; use {', '.join(ATTENTIONS)}")
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise UsageError("flash_attention_2 is not installed here; take attention = 'sdpa'")
    return None if attention == "sdpa" else attention


def ask_config(spec: ModelSpec) -> PreTrainedConfig:
    """Load the configuration of a folder or hub id. Raises `UsageError`."""
    source, revision = cast(str, spec.source), revision_of(spec)

    def load() -> PreTrainedConfig:
        refuse_large_files(source)
        table, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
        if not spec.trust_remote_code:
            refuse_code(source, table)
        refuse_impossible(source, table)
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=spec.trust_remote_code)
        return cast(PreTrainedConfig, config)

    return ask(source, load)


def config_of(name: str, model_type: object, table: dict[str, Any]) -> PreTrainedConfig:
    """Make a configuration of what stands in a spec or in a checkpoint. Raises `UsageError` that begins with `name`."""
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        near = difflib.get_close_matches(str(model_type), list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{name}: model_type '{model_type}' is no causal LM of transformers{hint}")
    refuse_code(name, {**table, "model_type": model_type})
    refuse_impossible(name, table)
    return ask(name, lambda: AutoConfig.for_model(model_type, **table))


def ask_tokenizer(source: str, *, revision: str = "main", trust_remote_code: bool) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a folder or the hub. Raises `UsageError`."""

    def load() -> Any:
        refuse_large_files(source)
        if not trust_remote_code:
            refuse_foreign_tokenizer(source, revision)
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)

    tokenizer = ask(source, load)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UsageError(f"{source}: its tokenizer has no tokenizer.json; save it as a fast tokenizer first")
    return tokenizer


def one_line(error: Exception) -> str:
    """Return an exception's message up to the end of its first sentence, on one line."""
    line = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[\w)'\"])[.;] (?=[A-Z])", line, maxsplit=1)[0][:240].rstrip(". ")


def _explain(error: Exception) -> str:
    line = one_line(error)
    if isinstance(error, SafetensorError):
        return f"the weights are damaged ({line}); fetch or export them again"
    for fragment, explanation in _EXPLANATIONS.items():
        if fragment in str(error):
            return explanation
    return f"cannot be loaded: {line}"
