"""`kd.rollouts`: a round for a training loop of one's own."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from kdtrain.cache.format.manifest import CacheSettings
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cache.read.reader import CacheReader, LocalCache
from kdtrain.cache.write.writer import write_cache
from kdtrain.config.sections import CodecConfig
from kdtrain.data.packed import PackedRow
from kdtrain.errors import UsageError, as_whole
from kdtrain.files import json_digest
from kdtrain.models.loading import model_digest
from kdtrain.models.tokenizer import end_tokens, load_tokenizer, tokenizer_digest
from kdtrain.objective.loss import DistillationLoss
from kdtrain.plugins.rounds.answers import PromptReader
from kdtrain.plugins.rounds.writing import SCORED, RolloutAnswers, common_ends, round_settings
from kdtrain.teaching.teacher import OnlineTeacher, Writing
from kdtrain.training.student import Student


def rollouts(
    student: Any,
    teacher: Any,
    prompts: Sequence[Any],
    *,
    tokenizer: Any,
    number: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    num_samples: int | None = None,
    seed: int = 0,
    batch_size: int = 64,
    folder: Path | str | None = None,
) -> CacheReader:
    """Have a student continue prompts and its teacher score what it wrote, as `kdtrain distill --on-policy` does.

    Returns a data set, as `cache["train"]` is, of a row for each prompt; on it alpha is 1, whatever the loss has.

    Args:
        student: a `Student`, or a causal language model of transformers; it stays as it is.
        teacher: a causal language model in evaluation mode, or a `Teacher` that is loaded.
        prompts: texts, conversations (lists of messages), or lists of token ids.
        tokenizer: the one of both, or its folder or hub id.
        number: of the round: another one gives other draws.
        max_new_tokens: tokens that the student writes at most.
        temperature: at which it writes; 0 always takes the most likely token.
        top_k: the most likely entries of the teacher's distributions, kept exactly.
        num_samples: samples from the rest; by default 50 without `top_k`, else none.
        seed: of the draws and the samples.
        batch_size: prompts that are continued together, which decides the last bits.
        folder: where the round is kept as a cache, and found again; by default one that goes with the process.

    Raises:
        UsageError: the models do not fit together, a prompt has no tokens, or the folder holds something else.
    """
    tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if not isinstance(teacher, OnlineTeacher):
        if teacher.training:
            raise UsageError("the teacher is in training mode; call its eval()")
        teacher = OnlineTeacher.of(teacher)
    if not isinstance(student, Student):
        student = Student(student, DistillationLoss(alpha=0.0))
        student.vocab_size = min(student.vocab_size, teacher.vocab_size)
    policy = {"spec": type(student.model.model).__name__, "weights_digest": model_digest(student.model), "step": None}
    how = Writing(
        temperature=temperature,
        top_p=1.0,
        end_tokens=common_ends(student, end_tokens(None, tokenizer), tokenizer),
        seed=as_whole(seed, "seed"),
        batch_size=batch_size,
        policy={**policy, "round": as_whole(number, "number"), "attempt": 1},
    )
    with closing(PromptReader(tokenizer, how.end_tokens, 0)) as reader:
        found = [reader.prompt(f"prompt {at}", each) for at, each in enumerate(prompts)]
    if not found:
        raise UsageError("prompts is empty; give a text, a conversation or token ids for each row")
    seq_len = max(map(len, found)) + as_whole(max_new_tokens, "max_new_tokens", 1) - 1
    found.sort(key=len)
    room = {"seq_len": seq_len, "max_new_tokens": max_new_tokens}
    rows = [PackedRow.prompt(each, **room, filler=reader.filler) for each in found]
    settings = CacheSettings(
        codec=CodecSpec.requested(CodecConfig(top_k=top_k, num_samples=num_samples), teacher.vocab_size),
        seq_len=seq_len,
        tokenizer_size=len(tokenizer),
        tokenizer_digest=tokenizer_digest(tokenizer),
        teacher=dict(teacher.identity),
        data={"source": "kd.rollouts", "prompts_digest": json_digest(found)},
    )
    settings = round_settings(settings, how, {"prompt_tokens": None, "max_new_tokens": max_new_tokens})
    if folder is None:
        folder = tempfile.mkdtemp(prefix="kdtrain-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    answers = RolloutAnswers(student, how, teacher.answers(settings), SCORED)
    answers.logits = None  # the fidelity is not measured
    write_cache(folder, settings, {"train": rows}, teacher=answers, tokenizer=tokenizer, batch_size=batch_size)
    return LocalCache(Path(folder))["train"]
