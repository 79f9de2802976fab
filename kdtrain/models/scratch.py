"""Models without weights of their own: from a configuration, or from some layers of a teacher.

A spec's `[config]` holds the configuration; keys that its kind of model does not have are refused (transformers keeps
them silently). Initial weights are those of transformers, drawn on the CPU from a seed, so that they are the same on
every device. Layers of a teacher are copied by name: the layers are the one list of modules whose length is the
configuration's number of layers; everything else (embeddings, norms, head) is copied unchanged.
"""

import copy
import difflib
import inspect
import os
import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kdtrain.errors import UsageError
from kdtrain.models.hub import ask, ask_config, ask_tokenizer, attention_option, refuse_code, refuse_impossible
from kdtrain.models.spec import ModelSpec, read_spec
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
        near = difflib.get_close_matches(str(model_type), list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"{name}: model_type '{model_type}' is not a causal LM of transformers{hint}")
    refuse_code(name, {**table, "model_type": model_type})
    refuse_impossible(name, table)
    return ask(name, lambda: AutoConfig.for_model(model_type, **table))


def configuration(spec: ModelSpec, vocab_size: int | None) -> PreTrainedConfig:
    """Return the transformers configuration of a spec; `vocab_size`: for a `[config]` that states none."""
    if spec.config is None and spec.init == "teacher-layers":
        return layers_config(configuration(read_spec(cast(str, spec.teacher), "teachers"), None), spec.layers)
    if spec.config is None:
        return ask_config(spec)
    table = dict(spec.config)
    model_type = table.pop("model_type")
    if model_type in CONFIG_MAPPING:
        default = ask(spec.name, CONFIG_MAPPING[model_type])
        for key in table:
            if not hasattr(default, key) and key not in _OLD_KEYS and not _reads(default, key):
                near = difflib.get_close_matches(key, list(vars(default)), n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UsageError(f"{spec.name}: [config] {key} is unknown to {model_type}{hint}")
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


def _reads(config: PreTrainedConfig, key: str) -> bool:
    """Return whether a model's code reads a key that its configuration does not declare, as Qwen's `head_dim`."""
    code = Path(inspect.getfile(type(config)).replace("configuration_", "modeling_"))
    return code.is_file() and f'getattr(config, "{key}"' in code.read_text()
