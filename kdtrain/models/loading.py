"""From a spec to a model or a tokenizer, from a model to a folder, and the digest that tells two models
apart.

Models come from `transformers.AutoModelForCausalLM`, from safetensors only: nothing is unpickled, and code
that comes with a model is not run unless its spec says so. Teachers keep the dtype of their spec and are
frozen; students get float32 weights whatever was stored, because the optimizer's steps are smaller than
what bfloat16 resolves.

`transformers` reports what it cannot load by many types of exception of several lines; here each becomes a
`UsageError` of one line. It also starts a model on random weights when a checkpoint lacks some, with a
warning; here that is refused.
"""

import copy
import difflib
import errno
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kdtrain.errors import RunError, UsageError
from kdtrain.models.spec import ModelSpec, is_hub_id, read_spec

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

_FAILURES = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError),
    *(SafetensorError, StrictDataclassError, HfHubHTTPError, HFValidationError),
)
# Written by older configurations, and taken over into `rope_parameters` by transformers.
_OLD_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
_TOKENIZER_FILES = ("*token*", "vocab.*", "merges.txt", "chat_template*", "*.model")

Loaded = TypeVar("Loaded")


def load_tokenizer(source: ModelSpec | str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a spec, or of a folder or hub id. Raises `UsageError` if there is none."""
    options: dict[str, Any] = {"trust_remote_code": False}
    if isinstance(source, ModelSpec):
        options = _options(source) if source.tokenizer is None else options
        source = _tokenizer_of(source)
    tokenizer = _load(str(source), lambda: AutoTokenizer.from_pretrained(source, **options))
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UsageError(f"{source}: its tokenizer has no tokenizer.json; save it as a fast tokenizer first")
    return tokenizer


def load_teacher(spec: ModelSpec, device: str, seed: int = 0) -> PreTrainedModel:
    """Load a model to be asked: in evaluation mode, without gradients, in the dtype of its spec.

    seed: of the weights, for a spec that starts from scratch. Raises `UsageError` for what cannot be loaded.
    """
    model: Any = _build(spec, getattr(torch, spec.dtype), None, seed)
    return model.to(device).eval().requires_grad_(False)


def load_student(spec: ModelSpec, *, vocab_size: int | None, seed: int, device: str) -> PreTrainedModel:
    """Load or make a model to be trained, in float32 and in training mode.

    vocab_size: what the student must hold at least; also the size of a `[config]` that leaves it out. seed:
    of fresh weights; the global random state is left alone. Raises `UsageError` for what cannot be, a
    smaller vocabulary among it.
    """
    model: Any = _build(spec, torch.float32, vocab_size, seed)
    held = model.config.get_text_config().vocab_size
    if vocab_size is not None and held < vocab_size:
        raise UsageError(
            f"student {spec.name} has {held:,} tokens and needs {vocab_size:,}; take one of that vocabulary"
        )
    # An embedding's padding row gets no gradient. Packed rows hold no padding, and many models pad with a
    # real token.
    model.get_input_embeddings().padding_idx = None
    return model.to(device).train()


def model_digest(model: nn.Module) -> str:
    """Return the SHA-256 of the state dict: names in order, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def export_model(
    model: nn.Module, tokenizer_folder: Path | None, out: Path, *, dtype: str | None = None
) -> None:
    """Write a folder that `transformers.AutoModelForCausalLM` and `AutoTokenizer` load.

    model: a model or a `SplitModel`. dtype: of the weights written; by default the model's own. An earlier
    export in `out` is replaced once the new one is complete. Raises `UsageError` if `out` holds something
    else, and `RunError` if the weights cannot be written.
    """
    if out.exists() and not (out / "config.json").is_file() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: holds something else than an exported model; choose another folder")
    partial, old = out.with_name(out.name + ".tmp"), out.with_name(out.name + ".old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    for pattern in _TOKENIZER_FILES if tokenizer_folder is not None else ():
        for file in cast(Path, tokenizer_folder).glob(pattern):
            shutil.copyfile(file, partial / file.name)
    whole = _whole(model)
    try:
        (whole if dtype is None else copy.deepcopy(whole).to(getattr(torch, dtype))).save_pretrained(partial)
    except SafetensorError as error:
        raise RunError(f"{partial}: the weights cannot be written: {_one_line(error)}") from error
    if out.exists():
        out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def max_positions(model: nn.Module) -> int | None:
    """Return the longest sequence the model's configuration allows, in tokens; None if it sets no bound."""
    positions = getattr(_whole(model).config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def _whole(model: nn.Module) -> PreTrainedModel:
    whole = model if isinstance(model, PreTrainedModel) else model.model
    assert isinstance(whole, PreTrainedModel)
    return whole


def _tokenizer_of(spec: ModelSpec) -> str:
    if spec.tokenizer is None and spec.init == "teacher-layers":
        return _tokenizer_of(read_spec(cast(str, spec.teacher)))
    if (source := spec.tokenizer or spec.source) is None:
        raise UsageError(f"{spec.name}: this spec names no tokenizer; add tokenizer = a folder or hub id")
    return source


def _build(spec: ModelSpec, dtype: torch.dtype, vocab_size: int | None, seed: int) -> PreTrainedModel:
    if spec.init == "pretrained":
        return _pretrained(spec, dtype)
    from_layers = spec.init == "teacher-layers"
    model: Any = (
        _from_teacher_layers(spec, vocab_size, seed)
        if from_layers
        else _scratch(spec, _config(spec, vocab_size), seed)
    )
    return model.to(dtype)


def _pretrained(spec: ModelSpec, dtype: torch.dtype) -> PreTrainedModel:
    source, load = cast(str, spec.source), cast(Any, AutoModelForCausalLM.from_pretrained)
    options = _options(spec) | {"dtype": dtype, "attn_implementation": _attention(spec)}
    model, found = _load(
        source, lambda: load(source, use_safetensors=True, output_loading_info=True, **options)
    )
    if missing := sorted(found["missing_keys"]):
        raise UsageError(
            f"{source}: the weights lack {missing[0]} and {len(missing) - 1} more of the model's"
        )
    return model


def _scratch(spec: ModelSpec, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Make a model on the initial weights that transformers gives its kind, drawn on the CPU from `seed`."""
    make = AutoModelForCausalLM.from_config
    options = {"attn_implementation": _attention(spec), "trust_remote_code": spec.trust_remote_code}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _load(spec.name, lambda: make(config, dtype=torch.float32, **options))
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        eos = config.eos_token_id
        model.generation_config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    return model


def _from_teacher_layers(spec: ModelSpec, vocab_size: int | None, seed: int) -> PreTrainedModel:
    teacher = _build(read_spec(cast(str, spec.teacher)), torch.float32, None, seed)
    list_name, count = _layer_list(teacher, spec)
    if max(spec.layers) >= count:
        raise UsageError(
            f"{spec.name}: layers = {list(spec.layers)}, and {spec.teacher} has layers 0 to {count - 1}"
        )
    config = _with_layers(teacher.config, spec.layers) if spec.config is None else _config(spec, vocab_size)
    student = _scratch(spec, config, seed)
    given, weights = teacher.state_dict(), {}
    for name, tensor in student.state_dict().items():
        source = _teacher_name(name, list_name, spec.layers)
        if source not in given or given[source].shape != tensor.shape:
            of = list(given[source].shape) if source in given else "no such weight"
            raise UsageError(
                f"{spec.name}: {name} is {list(tensor.shape)}, the teacher has {of}; make [config] fit"
            )
        weights[name] = given[source]
    student.load_state_dict(weights)
    return student


def _layer_list(model: PreTrainedModel, spec: ModelSpec) -> tuple[str, int]:
    """Find the one outermost list of as many modules as the configuration has layers: its name and its length."""
    count = model.config.get_text_config().num_hidden_layers
    modules = dict(model.named_modules())
    lists = [
        name for name, module in modules.items() if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    outermost = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    if len(outermost) != 1:
        raise UsageError(
            f"{spec.name}: teacher {spec.teacher} has {len(outermost)} lists of layers; use init = 'scratch'"
        )
    return outermost[0], count


def _with_layers(teacher: PreTrainedConfig, layers: tuple[int, ...]) -> PreTrainedConfig:
    config = copy.deepcopy(teacher)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    config.num_hidden_layers = len(layers)
    return config


def _teacher_name(name: str, list_name: str, layers: tuple[int, ...]) -> str:
    match = re.match(rf"{re.escape(list_name)}\.(\d+)\.", name)
    if match is None or int(match[1]) >= len(layers):
        return name
    return f"{list_name}.{layers[int(match[1])]}.{name[match.end() :]}"


def _config(spec: ModelSpec, vocab_size: int | None) -> PreTrainedConfig:
    if spec.config is None:
        source = cast(str, spec.source)
        return _load(source, lambda: AutoConfig.from_pretrained(source, **_options(spec)))
    table = dict(spec.config)
    model_type = table.pop("model_type")
    _refuse_unknown_keys(spec, model_type, table)
    if vocab_size is not None:
        table.setdefault("vocab_size", vocab_size)
    if "vocab_size" not in table:
        raise UsageError(
            f"{spec.name}: [config] has no vocab_size, and there is no cache to take it from; add it"
        )
    return _load(spec.name, lambda: AutoConfig.for_model(model_type, **_special_tokens(spec, table) | table))


def _refuse_unknown_keys(spec: ModelSpec, model_type: str, table: dict[str, Any]) -> None:
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = _nearest(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise UsageError(f"{spec.name}: model_type '{model_type}' is no causal LM of transformers{hint}")
    default = _load(spec.name, lambda: AutoConfig.for_model(model_type))
    for key in table:
        if not hasattr(default, key) and key not in _OLD_KEYS:
            raise UsageError(
                f"{spec.name}: [config] {key} is unknown to {model_type}{_nearest(key, vars(default))}"
            )


def _special_tokens(spec: ModelSpec, table: dict[str, Any]) -> dict[str, int | None]:
    """Return the tokenizer's ids, in place of defaults that may lie outside of the vocabulary.

    None for padding: an embedding's padding row would start at zero and get no gradient.
    """
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if spec.tokenizer is not None:
        tokenizer = load_tokenizer(spec.tokenizer)
        eos = tokenizer.eos_token_id
        ids |= {
            "eos_token_id": eos,
            "bos_token_id": eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id,
        }
    return {key: None if id is None or id >= table["vocab_size"] else id for key, id in ids.items()}


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _attention(spec: ModelSpec) -> str | None:
    # Asked for nothing, transformers takes sdpa where the model has it and eager where not; asked for sdpa,
    # it fails.
    return None if spec.attention == "sdpa" else spec.attention


def _options(spec: ModelSpec) -> dict[str, Any]:
    return {"trust_remote_code": spec.trust_remote_code, "revision": spec.revision or "main"}


def _load(source: str, load: Callable[[], Loaded]) -> Loaded:
    """Call `load`, and make one line of what transformers raises."""
    try:
        return load()
    except (torch.OutOfMemoryError, UsageError):
        raise
    except _FAILURES as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise UsageError(f"{source}: {_explain(source, error)}") from error


def _explain(source: str, error: Exception) -> str:
    line = _one_line(error)
    if "no file named model.safetensors" in line:
        return "no model.safetensors in this folder; weights are read from safetensors only, nothing is unpickled"
    if isinstance(error, SafetensorError):
        return f"the weights are damaged ({line}); fetch or export them again"
    if is_hub_id(source) and not Path(source).exists():
        return f"there is no such folder, and the hub does not yield it: {line}"
    return f"cannot be loaded: {line}"


def _one_line(error: Exception) -> str:
    """Return the message up to its first sentence end past 40 characters, on one line."""
    line = " ".join(str(error).split()) or type(error).__name__
    return re.split(r"(?<=[\w)'\"])[.;] (?=[A-Z])", line, maxsplit=1)[0][:240].rstrip(". ")
