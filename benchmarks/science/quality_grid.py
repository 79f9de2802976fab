"""Which students docs/quality.md compares: the studies, each a list of runs of the record.

`benchmarks/science/quality*.toml` are the sweeps that train them, but for those of the caches in `FORMER`.
Choices (rates, temperatures, weights, divergences) are compared after `SHORT` steps, at which all students are far from
converged, what is recommended after `LONG`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

SHORT, LONG = 625, 2500
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
RATE = 2e-3
"""The peak learning rate of all other studies: the best of `RATES` for both cross-entropy and distillation."""
PLAIN, ALONE = ("--alpha", "0"), ("--alpha", "1")
"""Cross-entropy without a teacher, and the teacher without cross-entropy."""
RENORMALIZED_TEACHER = "renormalized-teacher"
"""The tail rule of `benchmarks.science.renormalized_teacher`, which is not kdtrain's."""
FORMER = {
    **{f"i{n}": ("--top-k", "0", "--num-samples", f"{n}") for n in (12, 16, 40)},
    "k8i24": ("--top-k", "8", "--num-samples", "24"),
}
"""Caches of independent samples, as RS-KD has them, about 5, 6 and 12 different ones a token without a top-k. The
command built them until commit 05af2d3; it draws systematic samples now."""
CACHES = {
    **{f"k{k}": ("--top-k", f"{k}") for k in (3, 12, 50)},
    **{f"s{n}": ("--top-k", "0", "--num-samples", f"{n}") for n in (16, 50)},
    **FORMER,
    "dense": ("--dense",),
}
"""Options of each cache."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run of one student: all options that distinguish it from the others."""

    corpus: str = "stdlib"
    student: str = "1m"
    cache: str = "k12"
    sequences: int | None = None
    """Sequences that its cache holds; all if not given."""
    steps: int = SHORT
    lr: float = RATE
    options: tuple[str, ...] = ()
    """Options of `kdtrain distill`, in pairs, that differ from those that all students have in common."""
    seed: int = 0

    @property
    def source(self) -> str:
        """The name of the folder of its cache."""
        return f"{self.corpus}-{self.cache}" + (f"-{self.sequences}" if self.sequences else "")


def tail(name: str) -> tuple[str, ...]:
    """Return the option that names a tail rule; none for the default ones."""
    return () if name in ("ghost", "sampled") else ("--tail", name)


CROSS_ENTROPY, WHOLE, SAMPLES = Run(options=PLAIN), Run(cache="dense", options=ALONE), Run(cache="s50")
CHOICES = (CROSS_ENTROPY, WHOLE, replace(SAMPLES, options=ALONE), SAMPLES, Run())
"""The students of the last studies. `SAMPLES` has the cache, alpha and temperature of the command's defaults."""
QUARTER, PASS, PASSES = 3520, 220, (1, 2, 4, 8)
"""Sequences in a quarter of the text, steps in which all of them are seen once, and how often they are."""
DOCSTRINGS: dict[str, Any] = {"corpus": "docstrings", "sequences": 6000}
"""The second text, and how many of its sequences are cached."""


def rates() -> list[Run]:
    """List runs over the learning rate, tried as often for cross-entropy as for distillation."""
    return [Run(lr=lr, options=options) for lr in RATES for options in (PLAIN, ())]


def tails() -> list[Run]:
    """List runs over what a cache keeps, and over the rule for the rest."""
    rules = ("ghost", "drop", "renormalize", RENORMALIZED_TEACHER)
    return [
        Run(options=PLAIN),
        Run(cache="dense"),
        *(Run(cache="k3", options=tail(rule)) for rule in (rules[0], rules[-1])),
        *(Run(cache="k12", options=tail(rule)) for rule in rules),
        *(Run(cache=cache) for cache in ("k50", "s50", *FORMER)),
        Run(cache="k8i24", options=tail("control-variate")),
    ]


def samples() -> list[Run]:
    """List runs of systematic against independent samples, as many of them, without cross-entropy."""
    return [Run(cache=cache, options=ALONE) for cache in ("i16", "s16", "i40", "s50")]


def paper() -> list[Run]:
    """List the methods of Sparse Logit Sampling (arXiv 2503.16870), as there without cross-entropy."""
    return [
        Run(options=PLAIN),
        *(Run(cache=cache, options=(*ALONE, *tail(RENORMALIZED_TEACHER))) for cache in ("k12", "k50")),
        Run(cache="k50", options=ALONE),
        Run(cache="i40", options=ALONE),
        Run(cache="dense", options=ALONE),
    ]


def temperatures() -> list[Run]:
    """List runs with T fixed and learned, from a cache and from whole distributions."""
    fixed = [("--temperature", T) for T in ("0.7", "1.5", "2", "3")]
    learned = [("--temperature-mode", mode) for mode in ("likelihood", "adversarial", "minimize")]
    return [
        *(Run(options=options) for options in ((), *fixed, *learned)),
        *(Run(cache="dense", options=options) for options in ((), *fixed[1:3])),
    ]


def weights() -> list[Run]:
    """List runs over alpha, fixed and falling, for a rule with a bias, one without, and whole distributions."""
    choices = (("--alpha", "0.5"), (), ALONE, ("--alpha-schedule", "linear"))
    caches = ("k12", "s50", "k8i24", "dense")
    return [Run(options=PLAIN), *(Run(cache=cache, options=options) for cache in caches for options in choices)]


def divergences() -> list[Run]:
    """List runs of other divergences than forward KL."""
    names = ("reverse-kl", "jsd", "skew-kl", "skew-reverse-kl")
    return [Run(), *(Run(options=("--divergence", name)) for name in names)]


def warmups() -> list[Run]:
    """List runs over the steps of warm-up, for both kinds of student."""
    steps = ((), ("--warmup-steps", "10"), ("--warmup-steps", "200"))
    return [replace(kind, options=(*kind.options, *each)) for kind in (CROSS_ENTROPY, SAMPLES) for each in steps]


def final() -> list[Run]:
    """List the recommended settings and their alternatives, for the small student after four times the tokens."""
    return [replace(run, steps=LONG) for run in CHOICES]


def larger() -> list[Run]:
    """List the same runs of a student three times as large, after as many tokens as the other studies."""
    return [replace(run, student="3m") for run in CHOICES]


def second() -> list[Run]:
    """List the same runs on a text that the teacher was not trained on, and a smaller alpha.

    This text decided on alpha alone.
    """
    return [replace(run, **DOCSTRINGS) for run in (*CHOICES, replace(SAMPLES, options=("--alpha", "0.5")))]


def epochs() -> list[Run]:
    """List runs of 1 to 8 passes over a quarter of the text, and of one pass over the whole.

    The teacher ran once over the quarter.
    """
    kinds = [replace(SAMPLES, options=kind) for kind in (PLAIN, ())]
    quarter = [replace(kind, sequences=QUARTER, steps=PASS * each) for each in PASSES for kind in kinds]
    return [*quarter, *(replace(kind, steps=4 * PASS) for kind in kinds)]


def compared() -> list[tuple[Run, Run]]:
    """List the pairs that are compared, besides the first row of a table; both have the same seeds, steps and text."""
    alone, kept = replace(SAMPLES, options=ALONE), Run()
    main = [(alone, WHOLE), (SAMPLES, WHOLE), (SAMPLES, kept), (alone, SAMPLES)]
    top_k_alone = replace(kept, options=ALONE)
    half = replace(SAMPLES, options=("--alpha", "0.5"))
    warmed = [
        (replace(each, options=(*each.options, "--warmup-steps", "200")), each) for each in (SAMPLES, CROSS_ENTROPY)
    ]
    return [
        *((replace(each, steps=LONG), replace(against, steps=LONG)) for each, against in main),
        (replace(SAMPLES, student="3m"), replace(WHOLE, student="3m")),
        *main,
        (top_k_alone, kept),
        (SAMPLES, Run(cache="dense")),
        (SAMPLES, Run(options=tail(RENORMALIZED_TEACHER))),
        (Run(cache="s16", options=ALONE), Run(cache="i16", options=ALONE)),
        *warmed,
        *((replace(warmed[0][0], steps=steps), replace(SAMPLES, steps=steps)) for steps in (300, LONG)),
        *(
            (replace(each, **DOCSTRINGS), replace(against, **DOCSTRINGS))
            for each, against in (*((each, CROSS_ENTROPY) for each in (alone, SAMPLES, half)), *main)
        ),
    ]


def pairs() -> list[Run]:
    """List both sides of all compared pairs."""
    return [*dict.fromkeys(run for pair in compared() for run in pair)]


STUDIES: dict[str, Callable[[], list[Run]]] = {
    each.__name__: each
    for each in (
        *(final, larger, second, tails, samples, paper),
        *(rates, temperatures, weights, divergences, warmups, epochs, pairs),
    )
}


TIMED = {
    replace(CROSS_ENTROPY, steps=LONG): "cross-entropy",
    Run(steps=LONG): "top-12 from a cache",
    replace(SAMPLES, options=ALONE, steps=LONG): "50 samples from a cache",
    replace(WHOLE, steps=LONG): "whole distributions from a cache",
}
"""The students whose speed was measured."""
ONLINE = "an online teacher"

CALIBRATED = tuple(final())
"""The students whose calibration is drawn."""
