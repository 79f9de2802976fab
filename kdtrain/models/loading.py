"""Load or make a model from a spec, and compute a digest that identifies a model.

Models come from `transformers.AutoModelForCausalLM`, from safetensors only: nothing is unpickled, and code that comes
with a model runs only if its spec allows it. Teachers keep the dtype of their spec and are frozen; students get float32
weights whatever was stored, because the optimizer's steps are smaller than the resolution of bfloat16. If a checkpoint
lacks weights, transformers draws them at random, with a warning; here that is an error.

A model without weights of its own is made of a configuration, or of some layers of a teacher. A spec's `[config]` holds
the configuration; keys that its kind of model does not have are refused (transformers keeps them silently). Initial
weights are those of transformers, drawn on the CPU from a seed, so that they are the same on every device. Layers of a
teacher are copied by name: the layers are the one list of modules whose length is the configuration's number of layers;
everything else (embeddings, norms, head) is copied unchanged.
"""

import copy
import difflib
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kdtrain.errors import UsageError
from kdtrain.models.head import SplitModel, experts_of, split, state_ties
from kdtrain.models.hub import (
    ask,
    ask_config,
    ask_tokenizer,
    attention_option,
    opened,
    refuse_code,
    refuse_foreign_weights,
    refuse_impossible,
    refuse_large_generation,
    revision_of,
)
from kdtrain.models.spec import ADAPTER_CONFIG, ModelSpec
from kdtrain.models.tokenizer import generation_from, savable_generation
from kdtrain.tables import size

# Keys of older configurations, which transformers moves into `rope_parameters`.
_OLD_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}


def model_from_layers(spec: ModelSpec, teacher: PreTrainedModel, vocab_size: int | None) -> PreTrainedModel:
    """Make a model from the layers `spec.layers` of a teacher, float32, in its shape or the `[config]`'s.

    Raises `UsageError` for a layer the teacher does not have, and for any weight of another shape.
    """
    count = teacher.config.get_text_config().num_hidden_layers
    modules = dict(teacher.named_modules())
    lists = [name for name, module in modules.items() if isinstance(module, nn.ModuleList) and len(module) == count]
    outermost = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    if len(outermost) != 1:
        raise UsageError(
            f"{spec.name}: teacher {spec.teacher} has {len(outermost)} lists of layers; use init = 'scratch'"
        )
    list_name = outermost[0]
    if max(spec.layers) >= count:
        raise UsageError(f"{spec.name}: layers = {list(spec.layers)}, and {spec.teacher} has layers 0 to {count - 1}")
    config = layers_config(teacher.config, spec.layers) if spec.config is None else configuration(spec, vocab_size)
    if config.num_hidden_layers != len(spec.layers):
        raise UsageError(f"{spec.name}: layers names {len(spec.layers)} and [config] has {config.num_hidden_layers}")
    ours, theirs = (getattr(each, "tie_word_embeddings", False) for each in (config, teacher.config))
    if ours and not theirs:
        raise UsageError(
            f"{spec.name}: its output head is its embedding, and the teacher's is not; set tie_word_embeddings = false"
        )
    student = initialised(spec, config, seed=0)
    given = teacher.state_dict()
    weights = {}
    for name, tensor in student.state_dict().items():
        layer = re.match(rf"{re.escape(list_name)}\.(\d+)\.", name)
        source = f"{list_name}.{spec.layers[int(layer[1])]}.{name[layer.end() :]}" if layer else name
        if source not in given or given[source].shape != tensor.shape:
            of = list(given[source].shape) if source in given else "no such weight"
            raise UsageError(f"{spec.name}: {name} is {list(tensor.shape)}, the teacher has {of}; make [config] fit")
        weights[name] = given[source]
    student.load_state_dict(weights)
    return student


def layers_config(teacher: PreTrainedConfig, layers: tuple[int, ...]) -> PreTrainedConfig:
    """Return the configuration of a model of the layers `layers` of a teacher."""
    config = copy.deepcopy(teacher)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    config.num_hidden_layers = len(layers)
    return config


def initialised(spec: ModelSpec, config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Make a float32 model of a configuration with initial weights drawn from `seed`. UsageError: it cannot work."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = new_model(spec.name, config, spec.attention, trust_remote_code=spec.trust_remote_code)
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        eos = config.eos_token_id
        model.generation_config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    return model


def new_model(name: str, config: PreTrainedConfig, attention: str, *, trust_remote_code: bool) -> PreTrainedModel:
    """Make a float32 model of a configuration with initial weights. Raises `UsageError` that begins with `name`."""

    def make() -> PreTrainedModel:
        how = attention_option(attention, config)
        made = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), attn_implementation=how, trust_remote_code=trust_remote_code, dtype=torch.float32
        )
        return cast(PreTrainedModel, made)

    needed = 4 * parameter_count(name, config, trust_remote_code=trust_remote_code)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UsageError(
            f"{name}: its weights take {size(needed / 2**20)}, and this machine has {size(memory / 2**20)}; "
            "make its configuration smaller"
        )
    return ask(name, make)


def parameter_count(name: str, config: PreTrainedConfig, *, trust_remote_code: bool = False) -> int:
    """Count the parameters of a configuration's model, tied once. Raises `UsageError` that begins with `name`."""
    model = without_numbers(name, config, trust_remote_code=trust_remote_code)
    return sum(each.numel() for each in model.parameters())


def without_numbers(name: str, config: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Make a configuration's model on the meta device. Raises `UsageError` that begins with `name`."""

    def make() -> Any:
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)

    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model: PreTrainedModel = ask(name, make)
    return model


def config_of(name: str, model_type: object, table: dict[str, Any]) -> PreTrainedConfig:
    """Make a configuration from the table of a spec or a checkpoint. Raises `UsageError` that begins with `name`."""
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = _meant(str(model_type), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise UsageError(f"{name}: model_type '{model_type}' is not a causal LM of transformers{hint}")
    refuse_code(name, {**table, "model_type": model_type})
    refuse_impossible(name, table)
    return ask(name, lambda: AutoConfig.for_model(model_type, **table))


def configuration(spec: ModelSpec, vocab_size: int | None) -> PreTrainedConfig:
    """Return the transformers configuration of a spec; `vocab_size`: for a `[config]` that states none."""
    if spec.config is None and spec.init == "teacher-layers":
        return layers_config(configuration(ModelSpec.read(cast(str, spec.teacher), "teachers"), None), spec.layers)
    if spec.config is None:
        return ask_config(spec)
    table = dict(spec.config)
    model_type = table.pop("model_type")
    if model_type in CONFIG_MAPPING:
        default = ask(spec.name, CONFIG_MAPPING[model_type])
        for key in table:
            if not hasattr(default, key) and key not in _OLD_KEYS and not _reads(default, key):
                raise UsageError(f"{spec.name}: [config] {key} is unknown to {model_type}{_meant(key, vars(default))}")
    if vocab_size is not None:
        table.setdefault("vocab_size", vocab_size)
    if "vocab_size" not in table:
        raise UsageError(f"{spec.name}: [config] has no vocab_size, which no cache gives here; add it")
    if type(table["vocab_size"]) is not int:
        raise UsageError(f"{spec.name}: [config] vocab_size = {table['vocab_size']!r} is not a whole number")
    # no padding: an embedding's padding row would start at zero and get no gradient
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if spec.tokenizer is not None:
        tokenizer = ask_tokenizer(spec.tokenizer, trust_remote_code=False)
        eos = tokenizer.eos_token_id
        ids |= {"eos_token_id": eos, "bos_token_id": eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id}
    # in place of defaults that may be outside of the vocabulary
    ids = {key: None if id is None or id >= table["vocab_size"] else id for key, id in ids.items()}
    return config_of(spec.name, model_type, ids | table)


def _meant(word: str, known: Iterable[str]) -> str:
    """Return a hint at the name that is spelt most like `word`; empty where none is."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _reads(config: PreTrainedConfig, key: str) -> bool:
    """Return whether a model's code reads a key that its configuration does not declare, as Qwen's `head_dim`."""
    code = Path(inspect.getfile(type(config)).replace("configuration_", "modeling_"))
    return code.is_file() and f'getattr(config, "{key}"' in code.read_text()


def load_teacher(spec: ModelSpec, device: str, seed: int = 0) -> PreTrainedModel:
    """Load a teacher: in evaluation mode, without gradients, in the dtype of its spec.

    seed: of the weights, for a spec that starts from scratch. Raises `UsageError` for a spec that cannot be loaded, and
    for non-finite weights, which would otherwise look like a fault of the student or the data.
    """
    if spec.lora is not None:
        raise UsageError(f"teacher {spec.name}: [lora] is for a student, and a teacher is not trained; take it out")
    model: Any = _build(spec, getattr(torch, spec.dtype), None, seed)
    model = model.to(device).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UsageError(
                f"teacher {spec.name}: {name} is non-finite in {spec.dtype}; fetch or export the teacher again, "
                "or set another dtype in its spec"
            )
    return cast(PreTrainedModel, model)


def vocabulary(spec: ModelSpec) -> int:
    """Return the rows of the output head by a spec's configuration, without loading a weight."""
    return int(configuration(spec, None).get_text_config().vocab_size)


def is_model_folder(path: Path) -> bool:
    """Return whether a folder is not a run, and holds a model as transformers saves it."""
    return (path / "config.json").is_file() and not (path / "config.toml").exists()


def is_adapter(path: Path) -> bool:
    """Return whether a path is a `peft` folder."""
    return (path / ADAPTER_CONFIG).is_file()


def adapted(model: nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter, by name."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: each for name, each in model.named_modules() if isinstance(each, BaseTunerLayer)}


def refuse_overflow(state: Mapping[str, Tensor], kind: torch.dtype) -> None:
    """Raise a UsageError if a finite number of `state` is beyond the largest of `kind`."""
    for name, each in state.items():
        if each.is_floating_point() and (each.isfinite() & each.to(kind).isinf()).any():
            ends = f"{str(kind).removeprefix('torch.')} ends at {torch.finfo(kind).max:.5g}"
            raise UsageError(f"{name} has numbers up to {each.abs().max():.3g}, and {ends}; take another dtype")


def with_weights_of(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return `spec` with the model in `folder`, which agrees with all that the configuration of `spec` states.

    Raises `UsageError` where it does not.
    """
    if spec.init == "teacher-layers":
        raise UsageError(f"--load {folder} has all weights, and {spec.name} copies layers; give --student {folder}")
    found = replace(
        spec, source=os.path.normpath(folder), config=None, init="pretrained", revision=None, trust_remote_code=False
    )
    theirs = ask_config(found)
    own = configuration(spec, theirs.vocab_size)
    stated = plain_config(own) if spec.config is None else spec.config
    for key in stated:
        ours, loaded = getattr(own, key, None), getattr(theirs, key, None)
        untied = key == "tie_word_embeddings" and loaded is False and spec.config is None  # as by `state_ties`
        if ours != loaded and not (untied or key.endswith(("_token_id", "architectures", "_eps", "_epsilon"))):
            raise UsageError(f"--load {folder} has {key} = {loaded}, and {spec.name} {ours}; give --student {folder}")
    return found


def load_student(spec: ModelSpec, *, vocab_size: int | None, seed: int, device: str) -> PreTrainedModel:
    """Load or make a student, in float32 and in training mode.

    vocab_size: the smallest vocabulary that the student may have; also the size of a `[config]` without one. seed: of
    fresh weights; the global random state does not change. Raises `UsageError` for a spec that cannot be loaded, or a
    smaller vocabulary.
    """
    model: Any = _build(spec, torch.float32, vocab_size, seed)
    held = model.config.get_text_config().vocab_size
    if vocab_size is not None and held < vocab_size:
        raise UsageError(
            f"student {spec.name} has {held:,} tokens and needs {vocab_size:,}; take one of that vocabulary"
        )
    if model.generation_config is not None:
        model.generation_config = savable_generation(model.generation_config)
    # An embedding's padding row gets no gradient. Packed rows are not padded, and many models pad with eos.
    model.get_input_embeddings().padding_idx = None
    return model.to(device).train()


def architecture(model: nn.Module) -> dict[str, Any]:
    """Return the configuration of a model, which decides its shape and its forward, as plain JSON values."""
    return plain_config(whole_model(model).config)


def plain_config(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a configuration as plain JSON values, without the keys that do not decide the forward."""
    kept = json.loads(config.to_json_string())
    return {key: value for key, value in kept.items() if key not in ("transformers_version", "dtype", "_name_or_path")}


def generation_settings(model: nn.Module) -> dict[str, Any]:
    """Return a model's settings for sampling and the tokens that end its texts, as plain JSON values."""
    given = whole_model(model).generation_config
    return {} if given is None else json.loads(given.to_json_string())


def model_of(
    name: str, kept: dict[str, Any], attention: str, generation: dict[str, Any] | None = None
) -> PreTrainedModel:
    """Make a float32 model of an `architecture`, with its `generation_settings`; the caller loads its weights.

    Safe for tables of an unknown author: no code runs. Raises `UsageError` that begins with `name`.
    """
    table = {key: PreTrainedConfig._decode_special_floats(value) for key, value in kept.items()}  # of to_json_string
    config = config_of(name, table.pop("model_type", None), table)
    model = new_model(name, config, attention, trust_remote_code=False)
    if generation is not None and model.generation_config is not None:
        model.generation_config = generation_from(name, generation)
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make the layers of a model store only their inputs in training and recompute the rest in the backward.

    Values and gradients stay the same to the last bit, dropout included (arXiv 1604.06174).

    Raises:
        UsageError: the model does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise UsageError(f"{type(model).__name__} cannot recompute its layers; leave --activation-checkpointing out")
    # The reentrant kind needs inputs with gradients, and does not compile with embeddings of tokens.
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(how)
    else:
        model.gradient_checkpointing_enable(how)


def model_digest(model: nn.Module, *dtypes: torch.dtype) -> str:
    """Return the SHA-256 of the state dict (`state_digest`), cast to each of `dtypes`."""
    return state_digest(model.state_dict(), *dtypes)


def state_digest(state: Mapping[str, Any], *dtypes: torch.dtype) -> str:
    """Return the SHA-256 of tensors: names in order, dtypes, shapes and bytes, floats cast to each of `dtypes`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        for dtype in dtypes if tensor.is_floating_point() else ():
            tensor = tensor.to(dtype)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def max_positions(model: nn.Module | PreTrainedConfig) -> int | None:
    """Return the longest sequence that a model's configuration allows, in tokens; None without a bound."""
    config = model if isinstance(model, PreTrainedConfig) else whole_model(model).config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def refuse_long(model: nn.Module | PreTrainedConfig, name: str, seq_len: int) -> None:
    """Refuse sequences longer than a model's positions."""
    longest = max_positions(model)
    if longest is not None and seq_len > longest:
        raise UsageError(f"--seq-len {seq_len} is beyond the {longest} positions of {name}; choose at most {longest}")


def active_parameters(model: nn.Module) -> int:
    """Count the parameters that one token uses: of a mixture's experts, the share to which the token is routed."""
    experts, chosen = experts_of(whole_model(model).config) or (1, 1)
    share = Fraction(chosen, experts)
    return int(sum(each.numel() * (share if ".experts." in name else 1) for name, each in model.named_parameters()))


def check_fits(model: SplitModel, name: str, seq_len: int, document_mask: bool) -> None:
    """Refuse sequences longer than a model's positions, and a document mask that it cannot apply."""
    refuse_long(model, name, seq_len)
    if document_mask and not model.separates_documents:
        raise UsageError(f"{name} cannot keep packed documents apart; use --no-document-mask")


def check_student(spec: ModelSpec, seq_len: int, document_mask: bool) -> None:
    """Load a student to check that it fits, as `check_fits` does."""
    size = None if spec.config is None or "vocab_size" in spec.config else 512
    model = split(load_student(spec, vocab_size=size, seed=0, device="cpu"))
    check_fits(model, spec.name, seq_len, document_mask)


def whole_model(model: nn.Module) -> PreTrainedModel:
    """Return the model of transformers that a split model holds, or the model itself."""
    whole = model if isinstance(model, PreTrainedModel) else model.model
    assert isinstance(whole, PreTrainedModel)
    return whole


def _build(spec: ModelSpec, dtype: torch.dtype, vocab_size: int | None, seed: int) -> PreTrainedModel:
    if not spec.is_local:
        raise UsageError(f"{spec.name}: kind = '{spec.kind}' is of a teacher; a student's layers are local")
    if spec.init == "pretrained":
        return _pretrained(spec, dtype)
    model: Any
    if spec.init == "teacher-layers":
        teacher = _build(ModelSpec.read(cast(str, spec.teacher), "teachers"), torch.float32, None, seed)
        model = model_from_layers(spec, teacher, vocab_size)
    else:
        model = initialised(spec, configuration(spec, vocab_size), seed)
    return model.to(dtype)


def _pretrained(spec: ModelSpec, dtype: torch.dtype) -> PreTrainedModel:
    source = cast(str, spec.source)
    trusted = spec.trust_remote_code
    config = ask_config(spec)
    attention = attention_option(spec.attention, config)
    options = {"revision": revision_of(spec), "dtype": dtype, "attn_implementation": attention}

    def load() -> Any:
        if (file := opened(source)) is not None:
            return file.load(config, dtype=dtype, attn_implementation=attention)
        refuse_large_generation(source, revision_of(spec))
        if not trusted:
            refuse_foreign_weights(source, revision_of(spec))
        return AutoModelForCausalLM.from_pretrained(
            source, config=config, trust_remote_code=trusted, use_safetensors=True, output_loading_info=True, **options
        )

    model, found = ask(source, load)
    if missing := sorted(found["missing_keys"]):
        raise UsageError(f"{source}: the weights lack {missing[0]} and {len(missing) - 1} more of the model's")
    state_ties(model)
    return cast(PreTrainedModel, model)
