"""Asking transformers and the hub for something, and saying in one line why it could not be had.

`transformers` reports what it cannot load by many types of exception of several lines, among warnings and
progress bars. Importing this module turns those off; `ask` makes a `UsageError` of one line of any exception.
What went wrong in between, such as a lost connection, is not told apart from what cannot be.
"""

import errno
import logging
import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kdtrain.errors import UsageError
from kdtrain.models.spec import ModelSpec

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

# What transformers says, and what that means to the one who asked.
_EXPLANATIONS = {
    "model.safetensors": "no weights in safetensors there; other formats are not read, nothing is unpickled",
    "couldn't connect": "no such folder, and the hub cannot be reached; check the name and the network",
    "not a valid model identifier": "no such folder, and no such model on the hub; check the name",
    "contains custom code": "it brings its own code; if you trust that, set trust_remote_code = true in a TOML",
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
        return load()
    except (torch.OutOfMemoryError, MemoryError, UsageError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise UsageError(f"{source}: {_explain(error)}") from error


def hub_options(spec: ModelSpec) -> dict[str, Any]:
    """Return the options that every `from_pretrained` takes: revision, and whether to run foreign code."""
    return {"trust_remote_code": spec.trust_remote_code, "revision": spec.revision or "main"}


def attention_option(spec: ModelSpec) -> str | None:
    """Return `attn_implementation` for transformers.

    None for sdpa: asked for sdpa, it fails where a model has none; asked for nothing, it takes eager there.
    """
    return None if spec.attention == "sdpa" else spec.attention


def ask_tokenizer(source: str, **options: Any) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a folder or the hub. Raises `UsageError`."""
    tokenizer = ask(source, lambda: AutoTokenizer.from_pretrained(source, **options))
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
