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
from functools import cache
from pathlib import Path
from typing import Any

__version__ = "0.3.0"


@cache
def _modules() -> dict[str, tuple[str, str]]:
    """Return the module of each name, and its name there, as `__init__.pyi` tells type checkers too."""
    import ast

    stub = ast.parse(Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {each.asname or each.name: (str(node.module), each.name) for node in imports for each in node.names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        from kdtrain.registry import own_names

        return sorted({*_modules(), *own_names()})
    from importlib.metadata import entry_points

    place = _modules().get(name)
    if place is None and (name.startswith("_") or not entry_points(group="kdtrain.library", name=name)):
        raise AttributeError(f"module 'kdtrain' has no attribute '{name}'")
    from kdtrain.imports import quiet_import

    with quiet_import():
        if place is None:  # a plugin's
            from kdtrain.registry import offered

            value = offered(name)
        else:
            value = getattr(importlib.import_module(place[0]), place[1])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})
