"""kdtrain: knowledge distillation of language models, from a teacher's cached logits to a smaller student.

The library, every name of which is imported when it is first used:

    Cache, collate, Mixture       a teacher's cached distributions, as data sets of dicts of tensors, alone or mixed
    Alignment                     two tokenizers on the same bytes; a cache's split for another one is `aligned`
    CacheWriter                   writes a cache from the logits of any teacher, one sequence after the other
    DistillationLoss              (1 - alpha) CE + alpha T^2 KD, with its temperature: fixed, scheduled or learned
    Student                       a causal language model and its loss as one module, for any training loop
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
    from kdtrain.cache.read.mixture import Mixture
    from kdtrain.cache.read.reader import collate
    from kdtrain.checkpoint.nested import CheckpointStore
    from kdtrain.checkpoint.tiers import Keep
    from kdtrain.cli import register_command
    from kdtrain.commands.distill import distill
    from kdtrain.config import CacheTeacherConfig, DistillConfig
    from kdtrain.data.corpus import register_text
    from kdtrain.errors import RunError, UsageError
    from kdtrain.library import Cache, CacheWriter, cache_teacher
    from kdtrain.models.output_head import Head
    from kdtrain.monitor.loggers import Logger, register_logger
    from kdtrain.monitor.record import RunRecord
    from kdtrain.monitor.runs import runs
    from kdtrain.objective.divergence import register_divergence
    from kdtrain.objective.loss import DistillationLoss, LossOutput, distillation_loss
    from kdtrain.objective.tails import register_tail
    from kdtrain.objective.targets import DenseTargets
    from kdtrain.objective.temperature import (
        AdversarialTemperature,
        LikelihoodTemperature,
        MinimizedTemperature,
        ScheduledTemperature,
        Temperature,
        register_temperature,
    )
    from kdtrain.precision.backends import quantize_, register_backend
    from kdtrain.precision.controller import Policy, PrecisionController
    from kdtrain.teaching.online import Teacher
    from kdtrain.teaching.teacher import register_teacher
    from kdtrain.tokenizers.alignment import Alignment
    from kdtrain.training.optimizers import register_optimizer
    from kdtrain.training.sources.source import Facts, SourceRequest, register_source
    from kdtrain.training.student import Student

_HOME = {
    "kdtrain.cache.read.mixture": ("Mixture",),
    "kdtrain.cache.read.reader": ("collate",),
    "kdtrain.checkpoint.nested": ("CheckpointStore",),
    "kdtrain.checkpoint.tiers": ("Keep",),
    "kdtrain.cli": ("register_command",),
    "kdtrain.commands.distill": ("distill",),
    "kdtrain.config": ("CacheTeacherConfig", "DistillConfig"),
    "kdtrain.tokenizers.alignment": ("Alignment",),
    "kdtrain.data.corpus": ("register_text",),
    "kdtrain.errors": ("RunError", "UsageError"),
    "kdtrain.library": ("Cache", "CacheWriter", "cache_teacher"),
    "kdtrain.models.output_head": ("Head",),
    "kdtrain.monitor.loggers": ("Logger", "register_logger"),
    "kdtrain.monitor.record": ("RunRecord",),
    "kdtrain.monitor.runs": ("runs",),
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
    "kdtrain.training.optimizers": ("register_optimizer",),
    "kdtrain.training.sources.source": ("Facts", "SourceRequest", "register_source"),
    "kdtrain.teaching.online": ("Teacher",),
    "kdtrain.teaching.teacher": ("register_teacher",),
    "kdtrain.training.student": ("Student",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = [
    "AdversarialTemperature",
    "Alignment",
    "Cache",
    "CacheTeacherConfig",
    "CacheWriter",
    "CheckpointStore",
    "DenseTargets",
    "DistillConfig",
    "DistillationLoss",
    "Facts",
    "Head",
    "Keep",
    "LikelihoodTemperature",
    "Logger",
    "LossOutput",
    "MinimizedTemperature",
    "Mixture",
    "Policy",
    "PrecisionController",
    "RunError",
    "RunRecord",
    "ScheduledTemperature",
    "SourceRequest",
    "Student",
    "Teacher",
    "Temperature",
    "UsageError",
    "cache_teacher",
    "collate",
    "distill",
    "distillation_loss",
    "quantize_",
    "register_backend",
    "register_command",
    "register_divergence",
    "register_logger",
    "register_optimizer",
    "register_source",
    "register_tail",
    "register_teacher",
    "register_temperature",
    "register_text",
    "runs",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'kdtrain' has no attribute '{name}'")
    quiet_import = importlib.import_module("kdtrain.imports").quiet_import
    with quiet_import():
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
