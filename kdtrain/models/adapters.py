"""Low-rank adapters (LoRA, arXiv 2106.09685) by `peft`: small matrices beside frozen weights, which alone are trained.

An adapted layer computes y = W x + scale * B A x, with W frozen, A [rank, D] drawn at random and B [O, rank] zero, so
that a student begins as its base. `inject` puts the layers of `peft` into a model of transformers in place: the model
keeps its class, its configuration and its output head, and only the names of adapted weights change (`.base_layer`).
What is trained is a small part of the state dict; the rest is frozen, and a digest stands for it (`frozen_digest`).
Embeddings and the output head have no adapters: the objective multiplies by the head's weight itself.

What others wrote (a `peft` folder, a checkpoint) names the adapted layers in the names of its tensors. Its own
patterns are not used, because a regular expression can be made to run without end.

What it gives up: experts that a model keeps as one three-dimensional parameter are no linear layers and stay frozen;
other methods of `peft` train through `kd.Student` only.
"""

import contextlib
import copy
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kdtrain.config.sections import ALL_LINEAR, LoraConfig
from kdtrain.errors import UsageError, first_sentence, printable
from kdtrain.files import open_regular, read_json, refuse_leading_out
from kdtrain.imports import optional
from kdtrain.models.head import SplitModel, layers_of
from kdtrain.models.loading import adapted, refuse_overflow, state_digest
from kdtrain.models.spec import ADAPTER_CONFIG
from kdtrain.ranks import local

WEIGHTS = "adapter_model.safetensors"
"""The tensors in a `peft` folder."""
_NAME = "default"
"""Of the only adapter of a model; `peft` leaves it out of a file."""
_IN_FILES = "base_model.model."
_PART = re.compile(r"([\w.-]+)\.lora_(?:A|B|magnitude_vector)(?:\.weight)?")
"""The name of a tensor in a `peft` file, without `_IN_FILES`; in front, the layer's, which no pattern can be."""
_READ = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "rslora": "use_rslora", "dora": "use_dora"}
"""What is read of an `adapter_config.json`: the option without `lora_`, and its name there."""
_ANY = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "fan_in_fan_out"),
    *("inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
}
"""What changes nothing, or what the tensors say as well."""
_MOST = 100_000
"""Tensors of an adapter; those of the largest models have some thousands."""
_ONLY = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the base
}


def restrict(student: SplitModel, lora: LoraConfig | None, freeze_head: bool, seed: int) -> None:
    """Train only the adapters of a student, or all weights but its output head and those tied to it, in place.

    UsageError: as `inject`.
    """
    if lora is not None:
        student.lora = lora.over()
        inject(student.model, lora, seed)
    if freeze_head:
        student.model.get_output_embeddings().requires_grad_(False)
    if lora is not None or freeze_head:
        student.frozen = frozen_names(student)
        student.base = frozen_digest(student, student.frozen)


def inject(model: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Freeze a model and put adapters into it, in place; adapters of one seed are the same on every device.

    UsageError: `peft` is not installed, or no layer, or one that cannot have an adapter, is named.
    """
    peft = optional("peft", "lora", "LoRA")
    lora = _whole(lora)
    names = _targets(model, lora)
    transposed = any(isinstance(model.get_submodule(name), Conv1D) for name in names)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(_settings(lora, names, transposed), model)


class _Sketch(nn.Module):
    def __init__(self, base_layer: nn.Linear | Conv1D, lora: LoraConfig) -> None:
        super().__init__()
        assert lora.lora_rank is not None
        outputs, inputs = base_layer.weight.shape
        if isinstance(base_layer, Conv1D):
            outputs, inputs = inputs, outputs
        self.base_layer = base_layer
        self.dropout = nn.Dropout(lora.lora_dropout or 0.0)
        self.lora_A = nn.Linear(inputs, lora.lora_rank, bias=False)
        self.lora_B = nn.Linear(lora.lora_rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(self.dropout(x))) * 2.0
        return y


def sketch(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Do what `inject` does for a plan of memory, in a `FakeTensorMode`, where `peft` fails; without what DoRA adds."""
    lora = _whole(lora)
    model.requires_grad_(False)
    for name in _targets(model, lora):
        model.set_submodule(name, _Sketch(cast(Any, model.get_submodule(name)), lora))


def _whole(lora: LoraConfig) -> LoraConfig:
    found = lora.over()
    assert found is not None
    return found


def _settings(lora: LoraConfig, names: list[str], transposed: bool, base: str | None = None) -> Any:
    """Make the configuration of adapters that `peft` takes, and writes; base: where the frozen model is."""
    alpha = lora.lora_alpha or 32.0
    return optional("peft", "lora", "LoRA").LoraConfig(
        r=lora.lora_rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        lora_dropout=lora.lora_dropout or 0.0,
        use_rslora=lora.lora_rslora,
        use_dora=lora.lora_dora,
        target_modules=names,
        fan_in_fan_out=transposed,
        bias="none",
        task_type="CAUSAL_LM",
        inference_mode=base is not None,
        base_model_name_or_path=base,
    )


def _targets(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Return the names of the layers that get an adapter. UsageError: the options do not fit this model."""
    head = model.get_output_embeddings()
    targets = cast(str, lora.lora_targets)
    who = f"--lora-targets {printable(targets[:200])}"
    linear = {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D)}
    if targets == ALL_LINEAR:
        chosen = {name: each for name, each in linear.items() if each is not head}
    elif (wanted := lora.lora_names) is not None:
        ends: dict[str, list[str]] = {}
        for name in linear:
            parts = name.split(".")
            for start in range(len(parts)):
                ends.setdefault(".".join(parts[start:]), []).append(name)
        for each in wanted:
            if each not in ends:
                leaves = ", ".join(sorted({name.rpartition(".")[2] for name in linear if linear[name] is not head}))
                raise UsageError(f"{who}: the student has no linear layer '{printable(each[:80])}'; it has {leaves}")
        matched = {name for each in wanted for name in ends[each]}
        chosen = {name: each for name, each in linear.items() if name in matched}
    else:
        chosen = {name: each for name, each in linear.items() if re.fullmatch(targets, name)}
    if any(each is head for each in chosen.values()):
        raise UsageError(f"{who}: the output head cannot have an adapter; name layers of the backbone")
    if lora.lora_layers is not None:
        layers = layers_of(model)
        if lora.lora_layers > len(layers):
            raise UsageError(f"--lora-layers {lora.lora_layers} is more than the {len(layers)} layers of the student")
        last = {each for layer in layers[-lora.lora_layers :] for each in layer.modules()}
        chosen = {name: each for name, each in chosen.items() if each in last}
    if not chosen:
        raise UsageError(f"{who} matches no linear layer; the student has {', '.join(linear)[:200]}")
    largest = max(max(each.weight.shape) for each in chosen.values())
    if cast(int, lora.lora_rank) > largest:  # also in a stranger's file, whose rank could take any memory
        raise UsageError(f"--lora-rank {lora.lora_rank} is more than the {largest} numbers of a row of its layers")
    return list(chosen)


def adapter_parts(model: nn.Module) -> set[nn.Module]:
    """Return the modules that the adapters add: the parts of each adapted layer without its base layer."""
    found: set[nn.Module] = set()
    for layer in adapted(model).values():
        found |= {*layer.modules()} - {*layer.get_base_layer().modules()}
    return found


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Turn the adapters off in the block; `enable_adapters` would also make the adapters' tensors constants."""
    layers = list(adapted(model).values())
    try:
        for each in layers:
            each._disable_adapters = True
        yield
    finally:
        for each in layers:
            each._disable_adapters = False


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the state dict's entries that are not trained."""
    trained = {id(each) for each in model.parameters() if each.requires_grad}
    return frozenset(name for name, each in model.state_dict(keep_vars=True).items() if id(each) not in trained)


def frozen_digest(model: nn.Module, frozen: Iterable[str]) -> str:
    """Return the `state_digest` of these entries of the state dict, by their names without adapters."""
    entries = model.state_dict()
    return state_digest({name.replace(".base_layer.", "."): entries[name] for name in frozen})


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the model with its adapters added to the weights, by the names without adapters."""
    layers = adapted(model)
    state = dict[str, Tensor]()
    for name, tensor in model.state_dict().items():
        if not any(name.startswith(f"{layer}.") for layer in layers):
            state[name] = tensor
    for name, layer in layers.items():
        assert isinstance(layer.get_base_layer(), nn.Linear | Conv1D), "packed weights are not merged"
        alone = copy.deepcopy(layer)  # one at a time: a copy of the whole model may not fit
        alone.merge()
        state |= {f"{name}.{key}": each.cpu() for key, each in alone.get_base_layer().state_dict().items()}
    return state


def write_adapter(model: PreTrainedModel, lora: LoraConfig, base: str, out: Path, dtype: str | None = None) -> None:
    """Write the adapters as a folder that `peft.PeftModel.from_pretrained` loads; base: where the frozen model is."""
    names = list(adapted(model))
    transposed = any(isinstance(model.get_submodule(f"{name}.base_layer"), Conv1D) for name in names)
    settings = _settings(lora, [], transposed, base)
    leaves = {name.rpartition(".")[2] for name in names}
    alike = {name for name, each in model.named_modules() if name.rpartition(".")[2] in leaves}
    # the last parts where they name the same layers, as people write them; peft would write a set, in any order
    settings.target_modules = sorted(leaves if alike == {*names} else names)
    settings.save_pretrained(out)
    state = model.state_dict()
    kind = torch.float32 if dtype is None else getattr(torch, dtype)
    tensors = {name: state[own].detach().cpu() for name, own in _names_in_files(model).items()}
    refuse_overflow(tensors, kind)
    save_file({name: each.to(kind).contiguous() for name, each in tensors.items()}, out / WEIGHTS, {"format": "pt"})


def _names_in_files(model: nn.Module) -> dict[str, str]:
    """Return the name in the state dict of each tensor of the adapters, by its name in a `peft` file."""
    found = {}
    for name in model.state_dict():
        layer, dot, part = name.partition(".lora_")
        if dot:
            part = part.replace(f".{_NAME}", "").replace("magnitude_vector.weight", "magnitude_vector")
            found[f"{_IN_FILES}{layer}.lora_{part}"] = name
    return found


def read_adapter(folder: Path) -> LoraConfig:
    """Read the configuration of the adapters in a `peft` folder, which may come from somebody else.

    UsageError: it is not LoRA that `inject` makes.
    """
    try:
        table = read_json(folder / ADAPTER_CONFIG, dict[str, Any])
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder / ADAPTER_CONFIG} cannot be read: {error}") from None
    for key, value in table.items():
        if (key in _ONLY and value not in _ONLY[key]) or (key not in {*_ONLY, *_ANY, *_READ.values()} and value):
            shown = printable(f"{key} = {json.dumps(value)}"[:80])
            raise UsageError(f"{folder}: {shown} in its {ADAPTER_CONFIG}, which kdtrain does not train")
    values = {f"lora_{own}": table[theirs] for own, theirs in _READ.items() if theirs in table}
    with _open(folder) as file:
        names = [name.removeprefix(_IN_FILES) for name in sorted(file.keys())]
    return lora_of(values, names, f"{folder / ADAPTER_CONFIG}")


def lora_of(values: Mapping[str, Any], names: Iterable[str], where: str) -> LoraConfig:
    """Make the configuration of the adapters that a stranger's file describes by its numbers and its tensors' names.

    UsageError: they describe no adapters; the message begins with `where`.
    """
    numbers = {f"lora_{name}" for name in _READ}
    try:
        targets = ",".join(layers_in(names))
        return _whole(LoraConfig(**{name: values[name] for name in numbers & values.keys()}, lora_targets=targets))
    except (UsageError, AssertionError) as error:
        raise UsageError(f"{where}: {printable(error.args[0]) if error.args else 'it has no rank'}") from None


def layers_in(names: Iterable[str]) -> list[str]:
    """Return the layers with an adapter, by the names of the adapters' tensors.

    UsageError: there are other tensors, or more than any model has.
    """
    found: dict[str, None] = {}
    for count, name in enumerate(names):
        if count == _MOST:
            raise UsageError(f"the adapter has over {_MOST:,} tensors, more than any model")
        part = _PART.fullmatch(name.replace(f".{_NAME}", ""))
        if part is None:
            raise UsageError(f"a tensor {printable(name[:120])} of the adapter is none of LoRA")
        found[part[1]] = None
    return list(found)


def fill_adapter(
    model: nn.Module, folder: Path, part: Callable[[Tensor, Tensor], Tensor] = lambda whole, like: whole
) -> None:
    """Load the tensors of a `peft` folder into the adapters of a model.

    part: a tensor, and the one that it belongs into -> what this rank holds of it.

    UsageError: adapters and tensors do not fit each other.
    """
    names = _names_in_files(model)
    state = model.state_dict()
    with _open(folder) as file, torch.no_grad():
        if other := sorted({*names} ^ {*file.keys()}):
            raise UsageError(f"{folder} does not fit the adapters of the student: {printable(other[0][:120])}")
        for name, own in names.items():  # before one is read: they may be of any size
            theirs = file.get_slice(name).get_shape()
            ours = list(state[own].shape)
            if theirs != ours:
                raise UsageError(
                    f"{folder}: {name} has shape {theirs}, the student's {ours}; give the base that it is of"
                )
        for name, own in names.items():
            local(state[own]).copy_(part(file.get_tensor(name).float(), state[own]))


@contextlib.contextmanager
def _open(folder: Path) -> Iterator[Any]:
    path = folder / WEIGHTS
    try:
        refuse_leading_out(path, (folder, folder.resolve() / ".." / ".." / "blobs"))
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, ValueError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read: {first_sentence(error)}") from None
