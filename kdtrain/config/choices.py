"""The options to which a package can add names: the built-in names, each with its line of `--help`.

The modules named here hold the code and register it; see `kdtrain.registry`. Traits are what checks of options ask.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from kdtrain.registry import Registry

Weights = Literal["bf16", "int8", "nf4"]
"""Formats of frozen weights that take fewer bits (`kdtrain.models.frozen`)."""

IGNORES_T, GROWS_WITH_T = "ignores T", "grows with T"
"""Of a divergence: T^2 times it does not depend on T; it grows with T without limit (over whole distributions)."""
LEARNS, MAXIMIZES, SCHEDULED = "learns", "maximizes", "scheduled"
"""Of a temperature: T is a parameter; it goes where the loss is largest; it goes from --temperature to its end."""

DIVERGENCES = Registry(
    "--divergence",
    "kdtrain.divergences",
    "kdtrain.objective.divergence",
    {
        "forward-kl": "KL(p || q) of teacher p and student q",
        "reverse-kl": "KL(q || p)",
        "jsd": "Jensen-Shannon; jsd:B sets the teacher's share in the mixture (0.5), near 0 like forward-kl",
        "skew-kl": "KL(p || A p + (1 - A) q); skew-kl:A sets A (0.1)",
        "skew-reverse-kl": "KL(q || (1 - A) p + A q); skew-reverse-kl:A sets A (0.1)",
        "tvd": "total variation distance",
        "logit-mse": "mean squared difference of centred logits; dense targets only",
    },
    {"tvd": {GROWS_WITH_T}, "logit-mse": {IGNORES_T}},
)
TAILS = Registry(
    "--tail",
    "kdtrain.tails",
    "kdtrain.objective.tails",
    {
        "ghost": "one bucket for all entries not kept; a cache with samples uses sampled instead",
        "drop": "nothing; the loss drives the student's tail towards 0",
        "renormalize": "the top-k scaled to 1 on both sides",
        "sampled": "the samples, weighted: an unbiased estimate",
        "control-variate": "the bucket, corrected by the samples",
    },
)
TEMPERATURES = Registry(
    "--temperature-mode",
    "kdtrain.temperatures",
    "kdtrain.objective.temperature",
    {
        "fixed": "T is --temperature",
        "schedule": "T goes from --temperature to --temperature-end, linearly",
        "cosine": "T goes from --temperature to --temperature-end, as a cosine",
        "likelihood": "learned: the T at which the teacher gives the text the highest likelihood",
        "adversarial": "learned: the T at which the student is worst",
        "minimize": "learned: the T that minimises the loss; runs to a bound",
    },
    {
        "schedule": {SCHEDULED},
        "cosine": {SCHEDULED},
        "likelihood": {LEARNS},
        "adversarial": {LEARNS, MAXIMIZES},
        "minimize": {LEARNS},
    },
)
OPTIMIZERS = Registry(
    "--optimizer",
    "kdtrain.optimizers",
    "kdtrain.training.optimizers",
    {"adamw": "AdamW with decoupled weight decay"},
)
BACKENDS = Registry(
    "--fp8-backend",
    "kdtrain.backends",
    "kdtrain.precision.backends",
    {
        "torchao": "fp8 by torch._scaled_mm",
        "transformer-engine": "fp8 by cuBLAS",
        "emulated": "every format on every device, rounded in fp32; slower than no quantisation",
    },
)
TEACHERS = Registry(
    "the kind of teacher",
    "kdtrain.teachers",
    dict.fromkeys(("local", "self"), "kdtrain.teaching.local"),
    {
        "local": "a model of transformers, loaded here",
        "self": "the student without its adapters",
    },
)
FORMATS = Registry("the format of a model's file", "kdtrain.formats", __name__, {})
"""By the ending of a file that is a whole model: what makes a `kdtrain.models.hub.ModelFile` of its path."""
SOURCES = Registry(
    "--source",
    "kdtrain.sources",
    "kdtrain.training.sources.cache",
    {"cache": "a cache, or the packed text of --data"},
)
PLANS = Registry(
    "the plan of the data",
    "kdtrain.plans",
    {
        "cached": "kdtrain.training.sources.plan",
        "text": "kdtrain.run.build_cache",
        "aligned": "kdtrain.run.tokenizer_view",
    },
    {
        "cached": "finished caches, or another --source",
        "text": "the text of --data, packed",
        "aligned": "either, in the student's own tokens",
    },
)
"""What a run reads; a run of a finished cache imports the first alone."""
TEXTS = Registry(
    "--data",
    "kdtrain.texts",
    "kdtrain.data.corpus",
    {
        "stdlib": "code and documentation of Python's standard library",
        "hf": "hf:NAME[:SUBSET], a data set of the Hugging Face hub",
    },
)
LOGGERS = Registry("--log-to", "kdtrain.loggers", __name__, {})
EXPORTS = Registry(
    "--format",
    "kdtrain.exports",
    "kdtrain.commands.export",
    {"safetensors": "a folder that transformers loads"},
    {"safetensors": {"--adapter", "--shard-size", "--quantize int8"}},
)
"""Of an export; its traits are the options that it takes."""
OBSERVERS = Registry("the observer", "kdtrain.observers", __name__, {})
"""Functions that make an observer of a run's steps and events (`kdtrain.training.observers`)."""
Maker = TypeVar("Maker", bound=Callable[[Any], Any])


def register_observer(name: str, *, help: str = "") -> Callable[[Maker], Maker]:
    """Return a decorator of a function, which is called for each run that is built and returns its observer.

    The observer sees the run's steps and events. The function gets an `ObserverRequest`, and returns None for a run
    that it does not observe. Its module should import nothing heavy.
    """
    return OBSERVERS.registers(name, help)


def resolve_tail(tail: str, num_samples: int) -> str:
    """Return the name of the rule that is used: with samples, the default `ghost` means `sampled`."""
    return "sampled" if num_samples and tail == "ghost" else tail


def registered(option: str) -> dict[str, str]:
    """Return the names, each with its line, of a flag to which packages can add names; none for most flags."""
    return next((each.help() for each in globals().values() if getattr(each, "option", "") == option), {})
