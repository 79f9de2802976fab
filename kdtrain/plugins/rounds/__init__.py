"""Distillation on the student's own text, in rounds (docs/on-policy.md): it writes, its teacher scores, it learns.

A round is a cache of format version 5. The parts that need torch are imported by the runs that use them.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kdtrain.config.choices import DIVERGENCES, PLANS, register_observer
from kdtrain.config.commands import CacheTeacherConfig, DistillConfig
from kdtrain.config.sections import CodecConfig
from kdtrain.config.values import Options, flag, option, refuse, register_section
from kdtrain.errors import UsageError

SAMPLED = "sampled-reverse-kl"
"""The divergence that learns from the tokens which the student drew."""


_ONE_PROMPT = "--teacher-prompts and --teacher-system both say what the teacher alone reads; give one"


@dataclass(frozen=True, kw_only=True)
class WriterConfig(Options):
    """Who writes the text of --generate, where the teacher does not."""

    by: str | None = option(None, once=True, reads="student spec", shown="STUDENT", brief=True)
    """With --generate, this student writes and the teacher scores it; a run, an export, a hub id."""

    answers: Path | None = option(None, once=True, reads="file")
    """Text that another program wrote, instead of --data; a line with prompt and answer each (docs/on-policy.md)."""
    teacher_prompts: bool = False
    """The teacher reads the column teacher_prompt of --data in place of each prompt; the student learns without."""
    teacher_system: str | None = option(None, once=True, text=True, shown="TEXT")
    """A system prompt, or of plain text a beginning, that the teacher alone sees; the student learns to do without."""

    @property
    def writes(self) -> bool:
        """Whether a student writes or has written, or the teacher reads other prompts."""
        return bool(self.by or self.answers or self.teacher_prompts or self.teacher_system is not None)

    def check(self, config: CacheTeacherConfig) -> None:
        """Take the text of --answers for generated. UsageError: nothing is written, or twice."""
        data = config.data
        own = self.teacher_prompts or self.teacher_system is not None
        flags = {"--by": self.by is not None, "--answers": self.answers is not None, "--teacher-prompts": own}
        named = next((name for name, given in flags.items() if given), "")
        ranks = config.parallel
        shared = ranks.teacher_parallel == "fsdp" or ranks.teacher_tensor_parallel > 1
        needs = f"{named} needs the whole teacher on each rank"
        refuse(bool(named) and shared, f"{needs}; leave --teacher-parallel and --teacher-tensor-parallel out")
        refuse(self.teacher_prompts and self.teacher_system is not None, _ONE_PROMPT)
        if self.answers is None:
            refuse(self.by is not None and not config.text.generate, "--by has no effect without --generate; add it")
            if own and self.by is None:
                refuse(config.text.generate, "--generate without --by has the teacher write; leave its own prompts out")
                for name, given in {"--refine": config.refine is not None, "--dry-run": config.dry_run}.items():
                    refuse(given, f"{name} cannot be combined with prompts of the teacher's own; leave it out")
            return
        for name, given in {
            "--teacher-prompts": self.teacher_prompts,  # the file has them
            "--data": data.data not in (None, str(self.answers)),
            "--refine": config.refine is not None,
            "--prompt-tokens": config.text.prompt_tokens is not None,
            "--dry-run": config.dry_run,
            "--document-mask": data.document_mask is True,
            "--format": data.format not in ("auto", "prompt-completion"),
        }.items():
            refuse(given, f"--answers has its own text; leave {name} out")
        wrong = f"--answers {self.answers}: is not a .jsonl file; write a JSON object a line into one"
        refuse(self.answers.suffix != ".jsonl", wrong)
        object.__setattr__(config, "text", replace(config.text, generate=True))
        object.__setattr__(config, "data", replace(data, data=str(self.answers), format="prompt-completion"))

    def teacher(self, config: CacheTeacherConfig, teacher: Any, student: Callable[[str], Any]) -> Any:
        """Pair the teacher of a capture with the student that writes its text. UsageError: they do not fit.

        student: loads one by its name; `student`, the place of its `tokenizer`, and the `step` of a checkpoint.
        """
        from kdtrain.plugins.rounds.writing import written_by

        return written_by(self, teacher, student, config)


def _check_lengths(given: int | str) -> None:
    refuse(
        re.fullmatch(r"[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})?", str(given)) is None,
        f"--max-new-tokens '{str(given)[:80]}' is neither a number of tokens nor FIRST:LAST, such as 128:512",
    )


def _check_command(given: str) -> None:
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise UsageError(f"--write-with {given[:80]!r} cannot be split into words: {error}") from None
    for name in ("{model}", "{prompts}", "{out}"):
        refuse(not any(name in each for each in words), f"--write-with has no {name}; name it among its words")


@dataclass(frozen=True, kw_only=True)
class RoundsConfig(CodecConfig):
    """Train on what the student writes, in rounds (docs/on-policy.md); --top-k, --num-samples and --dense as there."""

    on_policy: bool = False
    """Train on the student's own text; each round it continues prompts of --data, and --teacher scores them."""
    rollouts: Path | None = option(None, once=True, reads="saved")
    """Train on the rounds that a run with --on-policy wrote; in their order, without a teacher."""
    top_k: int = option(0, least=0)
    """The most likely entries of each of the teacher's distributions, stored exactly in a round."""
    num_samples: int | None = option(None, least=0)
    """Samples from the rest, stored in a round; 50 without --top-k, else none."""
    dense: bool = False
    """Store whole distributions in a round instead."""
    round_rows: int = option(2048, least=1, needs="on_policy")
    """Prompts that the student continues in a round."""
    round_steps: int | None = option(None, least=1, needs="on_policy")
    """Steps that train on a round; one pass over it if not given."""
    prompt_tokens: int | None = option(None, least=1, needs="on_policy")
    """First tokens of plain text that are its prompt; by default 64, or half of --seq-len where that is less."""
    max_new_tokens: int | str = option("128", needs="on_policy", check=_check_lengths)
    """Tokens that the student writes at most; 128:512 grows from the first round to the last."""
    gen_temperature: float = option(1.0, least=0, most=100, needs="on_policy")
    """The temperature at which it writes; 0 always takes the most likely token."""
    gen_top_p: float = option(1.0, above=0, most=1, needs="on_policy")
    """Draw from the most likely tokens that have this probability together, and never from the others."""
    rollout_share: float = option(1.0, least=0, most=1, needs="on_policy")
    """Share of the sequences that the student wrote; the others are of --cache."""
    stale_rounds: int = option(0, least=0, needs="on_policy")
    """Rounds of the past that stay in the mix, each as often as the present one."""
    cold_start: int = option(0, least=0, needs="on_policy")
    """First steps, which train on --cache, or without one on the text of --data by cross-entropy."""
    rollout_batch_size: int = option(64, least=1, needs="on_policy")
    """Rows that the student continues together, which decides their last bits; lower it where memory ends."""
    write_with: str | None = option(
        None,
        free=True,
        once=True,
        text=True,
        private="runs a command",
        needs="on_policy",
        check=_check_command,
        shown="'COMMAND {model} {prompts} {out}'",
    )
    """A command that writes each round in place of kdtrain's decoder, such as an inference engine's script."""
    on_collapse: Literal["warn", "stop"] = option("warn", free=True)
    """What follows where the texts of a round became much shorter, longer or repetitive, or no longer end."""

    score_with: str | None = option(
        None, free=True, once=True, private="runs a function", needs="on_policy", shown="MODULE:FUNCTION"
    )
    """A function of yours, (prompt, answer, row) -> a number, whose mean over the held-out texts each round logs."""
    best_by: Literal["loss", "score"] = option("loss", needs="on_policy")
    """The best checkpoint has the lowest validation loss, or the highest score of --score-with at a validation."""
    teacher_prompts: bool = option(False, needs="on_policy")
    """The teacher reads the column teacher_prompt of --data in place of each prompt; the student learns without."""
    teacher_system: str | None = option(None, once=True, text=True, needs="on_policy", shown="TEXT")
    """A system prompt, or of plain text a beginning, that the teacher alone sees; the student learns to do without."""

    @property
    def data_plan(self) -> str | None:
        """The plan of the data, of `kdtrain.plans`."""
        return "rounds" if self.on_policy or self.rollouts is not None else None

    @property
    def own_text(self) -> bool:
        """Whether the plan takes --cache beside --teacher and --data, or neither."""
        return self.data_plan is not None

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens written at most in the first round, and in the last."""
        first, _, last = str(self.max_new_tokens).partition(":")
        return int(first), int(last or first)

    def conflicts(self) -> Iterator[tuple[object, str]]:
        yield from super().conflicts()
        both = "--on-policy writes rounds and --rollouts reads those of another run; give one"
        yield self.on_policy and self.rollouts is not None, both
        yield self.teacher_prompts and self.teacher_system is not None, _ONE_PROMPT
        scored = self.score_with is not None and self.rollout_share > 0
        yield self.best_by == "score" and not scored, "--best-by score needs --score-with and a --rollout-share above 0"
        for name in ("top_k", "num_samples", "dense"):
            given = getattr(self, name) != getattr(CodecConfig(), name)
            yield given and not self.on_policy, f"{flag(name)} has no effect without --on-policy; leave it out"

    def check(self, config: DistillConfig) -> None:
        """Make alpha 1 where all that is learned is the student's text. UsageError: the options do not go together."""
        objective, data = config.objective, config.data
        sampled = objective.divergence.partition(":")[0] == SAMPLED
        if self.data_plan is None:
            refuse(sampled, f"--divergence {SAMPLED} learns from what the student draws; add --on-policy or --rollouts")
            return
        which = "--on-policy" if self.on_policy else "--rollouts"
        for name, given in {
            "--source": config.source != "cache",
            "--cross-tokenizer": config.cross_tokenizer,
            "--hidden-loss": objective.hidden_loss != "none",
        }.items():
            refuse(given, f"{name} cannot be combined with {which}; leave one of them out")
        refuse(len(config.cache) > 1, f"{which} mixes with one --cache; leave the others out")
        cut = config.parallel.tensor_parallel > 1
        refuse(cut, f"{which} needs the whole student on each rank; use --parallel ddp in place of --tensor-parallel")
        if self.on_policy:
            refuse(config.teacher is None, "--on-policy needs a --teacher, which scores what the student writes")
            no_server = (
                "no server gives whole distributions, or both; use --top-k, or --num-samples of kdtrain's plugin"
            )
            both = self.dense or bool(self.top_k and self.samples)
            refuse(config.remote is not None and both, no_server)
            alone = "--teacher self is the student without its adapters; add --lora-rank, or name the student's spec"
            refuse(config.teacher == "self" and not config.lora.lora_rank, alone)
            refuse(data.data is None, "--on-policy needs --data, whose prompts the student continues")
            mixes = self.rollout_share < 1
            text = f"--rollout-share {self.rollout_share:g} mixes with --cache; give one, or leave it out"
            refuse(mixes and not config.cache, text)
            idle = "--cache has no effect with --on-policy alone; add --rollout-share or --cold-start, or leave it out"
            refuse(bool(config.cache) and not mixes and not self.cold_start, idle)
            refuse(
                not (data.messages_column or data.format not in ("auto", "text"))
                and (self.prompt_tokens or 0) >= data.seq_len,
                f"--prompt-tokens {self.prompt_tokens} leaves no room in --seq-len {data.seq_len}; use less",
            )
        else:
            refuse(data.data is not None, "--rollouts holds its own text; leave --data out")
            refuse(config.teacher is not None, "--rollouts holds what its teacher answered; leave --teacher out")
        if sampled:
            self._check_sampled(config)
        if not config.cache and objective.alpha != 1:
            refuse(
                objective.alpha_schedule != "constant", f"--alpha-schedule has no effect with {which}, where alpha is 1"
            )
            object.__setattr__(config, "objective", replace(objective, alpha=1.0))

    def _check_sampled(self, config: DistillConfig) -> None:
        objective = config.objective
        drawn = f"--divergence {SAMPLED} needs tokens that the student drew; leave --cache out"
        refuse(bool(config.cache), drawn)
        refuse(
            self.dense, f"--divergence {SAMPLED} is for samples and a top-k; with --dense use reverse-kl, the exact one"
        )
        for name in ("gen_top_p", "gen_temperature"):
            text = f"its tokens are draws of the student only at {flag(name)} 1; leave it out, or use forward-kl"
            refuse(getattr(self, name) != 1, f"--divergence {SAMPLED}: {text}")
        heated = objective.temperature != 1 or objective.learns_temperature or objective.schedules_temperature
        refuse(heated, f"--divergence {SAMPLED} is right at T = 1 only; leave the temperature's options out")


register_section("rounds", {"cache-teacher": WriterConfig, "distill": RoundsConfig})


class DrawnTokens:
    """KL(q || p) from the tokens that the student drew, with --on-policy; a top-k makes it exact inside."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the `Divergence`, whose module needs torch."""
        from kdtrain.plugins.rounds.loss import SAMPLED_REVERSE_KL

        vars(self).update(vars(SAMPLED_REVERSE_KL))  # compiled code imports nothing
        return getattr(SAMPLED_REVERSE_KL, name)


DIVERGENCES.add(SAMPLED, DrawnTokens(), DrawnTokens)


def rounds(request: Any) -> Any:
    """Return the plan of a run on the student's own text, whose module needs torch."""
    from kdtrain.plugins.rounds import plan

    return plan.rounds(request)


PLANS.add("rounds", rounds, rounds)


@register_observer("rounds")
def learning(request: Any) -> Any:
    """Log the seconds of each step beside a round, and the weights of --divergence sampled-reverse-kl."""
    if request.config.plugins["rounds"].data_plan is None:
        return None
    from kdtrain.plugins.rounds.learning import Learning

    sampled = request.config.objective.divergence.partition(":")[0] == SAMPLED
    return Learning(request.config.monitor.log_freq if sampled else None)
