"""kdtrain: knowledge distillation of language models, from a teacher's cached logits to a smaller student.

The library, every name of which is imported when it is first used:

    Cache, collate, Mixture       a teacher's cached distributions, as data sets of dicts of tensors, alone or mixed
    Alignment                     two tokenizers on the same bytes; a cache's split for another one is `aligned`
    CacheWriter                   writes a cache from the logits of any teacher, one sequence after the other
    DistillationLoss              (1 - alpha) CE + alpha T^2 KD, with its temperature: fixed, scheduled or learned
    Student, AlphaCallback        a causal language model and its loss as one module, for any training loop; what lets
                                  its alpha follow withheld text in a Trainer
    evaluation_metrics            cross-entropy and KL of a validation split, for transformers.Trainer
    distillation_loss, Head, DenseTargets   the loss as a function of hidden states, an output head and targets
    CheckpointStore, Keep         checkpoints published whole, verified before they are loaded, pruned by tier
    quantize_, PrecisionController, Policy   fp8 products, and when to switch them on and off
    runs, RunRecord               what runs have logged: flat records for a table of pandas, and all numbers of one
    register_...                  a divergence, tail rule, temperature mode, back end, text, source, teacher, logger or
                                  command of one's own
    distill, cache_teacher        the commands as functions, with DistillConfig and CacheTeacherConfig

Bad arguments raise `UsageError`, what fails while running raises `RunError`.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:
    from kdtrain.cache.read.mixture import Mixture as Mixture
    from kdtrain.cache.read.reader import collate as collate
    from kdtrain.callback import AlphaCallback as AlphaCallback
    from kdtrain.checkpoint.nested import CheckpointStore as CheckpointStore
    from kdtrain.checkpoint.tiers import Keep as Keep
    from kdtrain.cli import register_command as register_command
    from kdtrain.commands.distill import distill as distill
    from kdtrain.config.commands import CacheTeacherConfig as CacheTeacherConfig
    from kdtrain.config.commands import DistillConfig as DistillConfig
    from kdtrain.data.corpus import register_text as register_text
    from kdtrain.errors import RunError as RunError
    from kdtrain.errors import UsageError as UsageError
    from kdtrain.library import Cache as Cache
    from kdtrain.library import CacheWriter as CacheWriter
    from kdtrain.library import cache_teacher as cache_teacher
    from kdtrain.models.output_head import Head as Head
    from kdtrain.monitor.loggers import Logger as Logger
    from kdtrain.monitor.loggers import register_logger as register_logger
    from kdtrain.monitor.record import RunRecord as RunRecord
    from kdtrain.objective.divergence import register_divergence as register_divergence
    from kdtrain.objective.loss import DistillationLoss as DistillationLoss
    from kdtrain.objective.loss import LossOutput as LossOutput
    from kdtrain.objective.loss import distillation_loss as distillation_loss
    from kdtrain.objective.tails import register_tail as register_tail
    from kdtrain.objective.targets import DenseTargets as DenseTargets
    from kdtrain.objective.temperature import AdversarialTemperature as AdversarialTemperature
    from kdtrain.objective.temperature import LikelihoodTemperature as LikelihoodTemperature
    from kdtrain.objective.temperature import MinimizedTemperature as MinimizedTemperature
    from kdtrain.objective.temperature import ScheduledTemperature as ScheduledTemperature
    from kdtrain.objective.temperature import Temperature as Temperature
    from kdtrain.objective.temperature import register_temperature as register_temperature
    from kdtrain.precision.backends import quantize_ as quantize_
    from kdtrain.precision.backends import register_backend as register_backend
    from kdtrain.precision.controller import Policy as Policy
    from kdtrain.precision.controller import PrecisionController as PrecisionController
    from kdtrain.teaching.teacher import OnlineTeacher as Teacher  # noqa: F401
    from kdtrain.teaching.teacher import register_teacher as register_teacher
    from kdtrain.tokenizers.alignment import Alignment as Alignment
    from kdtrain.training.optimizers import register_optimizer as register_optimizer
    from kdtrain.training.sources.source import Facts as Facts
    from kdtrain.training.sources.source import SourceRequest as SourceRequest
    from kdtrain.training.sources.source import register_source as register_source
    from kdtrain.training.student import Student as Student
    from kdtrain.training.validate import evaluation_metrics as evaluation_metrics

_HOME = {
    "kdtrain.cache.read.mixture": ("Mixture",),
    "kdtrain.cache.read.reader": ("collate",),
    "kdtrain.checkpoint.nested": ("CheckpointStore",),
    "kdtrain.checkpoint.tiers": ("Keep",),
    "kdtrain.cli": ("register_command",),
    "kdtrain.commands.distill": ("distill",),
    "kdtrain.config.commands": ("CacheTeacherConfig", "DistillConfig"),
    "kdtrain.tokenizers.alignment": ("Alignment",),
    "kdtrain.data.corpus": ("register_text",),
    "kdtrain.errors": ("RunError", "UsageError"),
    "kdtrain.library": ("Cache", "CacheWriter", "cache_teacher"),
    "kdtrain.models.output_head": ("Head",),
    "kdtrain.monitor.loggers": ("Logger", "register_logger"),
    "kdtrain.monitor.record": ("RunRecord",),
    "kdtrain.objective.divergence": ("register_divergence",),
    "kdtrain.objective.loss": ("DistillationLoss", "LossOutput", "distillation_loss"),
    "kdtrain.objective.tails": ("register_tail",),
    "kdtrain.objective.targets": ("DenseTargets",),
    "kdtrain.objective.temperature": (
        *("AdversarialTemperature", "LikelihoodTemperature", "MinimizedTemperature", "ScheduledTemperature"),
        *("Temperature", "register_temperature"),
    ),
    "kdtrain.precision.backends": ("quantize_", "register_backend"),
    "kdtrain.precision.controller": ("Policy", "PrecisionController"),
    "kdtrain.callback": ("AlphaCallback",),
    "kdtrain.training.optimizers": ("register_optimizer",),
    "kdtrain.training.sources.source": ("Facts", "SourceRequest", "register_source"),
    "kdtrain.teaching.teacher": ("Teacher", "register_teacher"),
    "kdtrain.training.student": ("Student",),
    "kdtrain.training.validate": ("evaluation_metrics",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_NAMED_THERE = {"Teacher": "OnlineTeacher"}  # names that are others in their modules


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted({*_MODULE_OF, *importlib.import_module("kdtrain.registry").own_names()})
    module = _MODULE_OF.get(name)
    points = importlib.import_module("importlib.metadata").entry_points
    if module is None and (name.startswith("_") or not points(group="kdtrain.library", name=name)):
        raise AttributeError(f"module 'kdtrain' has no attribute '{name}'")
    with importlib.import_module("kdtrain.imports").quiet_import():
        if module is None:  # a plugin's
            value = importlib.import_module("kdtrain.registry").offered(name)
        else:
            value = getattr(importlib.import_module(module), _NAMED_THERE.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
