"""`--write-with`: a command of the user that writes a round in place of the student's own decoder.

Its words may hold {model}, the student exported for transformers, {prompts}, a file with a JSON object for each prompt
(its text, its token ids, the most tokens of its answer, and how these are drawn), and {out}, the file of answers to
write, in that order. No shell is involved. What it wrote is kept beside the rounds, by the settings of the round, among
them its attempt and the weights: a run that resumes reads it. The exported student is removed once the command has
ended.

What it gives up: the student's weights stay on the device meanwhile.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdtrain.data.packed import PackedRow
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import json_digest
from kdtrain.models.export import export_model
from kdtrain.outputs import OutFolder
from kdtrain.plugins.rounds.answers import SEEN, PromptReader, read_answers
from kdtrain.ranks import on_main, raise_on_all_ranks
from kdtrain.teaching.teacher import Writing

_LINES, _CHARACTERS = 5, 2000
"""What of a failed command's output is shown, at most."""
_LAUNCHER = re.compile("(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""What torchrun sets, which would make the command a rank."""
_WAIT = 0.2
"""Seconds between two looks for a stop request."""
_GRACE = 30.0
"""Seconds that a command has to end."""


def write_elsewhere(
    command: str,
    path: Path,
    model: Any,
    tokenizer: Path,
    reader: PromptReader,
    rows: Mapping[str, Iterable[PackedRow]],
    how: Writing,
    stopping: Callable[[], bool],
) -> Mapping[str, list[PackedRow]] | None:
    """Read the prompts `rows` with their answers from `path`, which is written if it is not there; every rank calls it.

    None where a stop was requested. RunError: the command failed, or its answers do not fit.
    """
    lines = list[dict[str, Any]]()
    for split, each in rows.items():
        for place, row in enumerate(each):
            tokens = row.tokens[: int(row.loss_mask.argmax()) + 1].tolist()
            text = reader.tokenizer.decode(tokens)
            most = int(row.loss_mask.sum())
            seed = int(json_digest([how.seed, how.policy, split, place])[:7], 16)
            drawn = {"temperature": how.temperature, "top_p": how.top_p, "seed": seed, "end_tokens": how.end_tokens}
            lines.append({"prompt": text, "tokens": tokens, "max_tokens": most, "split": split, **drawn})
            if SEEN in row.kept:
                lines[-1]["teacher_prompt"] = row.kept[SEEN][row.kept[SEEN] >= 0].tolist()

    def write() -> bool:
        folder = OutFolder(path.parent)
        prompts = path.with_suffix(".prompts")
        if path.exists():
            return True
        folder.sweep()
        folder.publish(prompts.name, "".join(f"{json.dumps(each)}\n" for each in lines), "rounds.prompts")
        try:
            with folder.hidden("student") as student, folder.published(path.name, "rounds.answers") as out:
                export_model(model, tokenizer, student)
                _run(command, {"{model}": student, "{prompts}": prompts, "{out}": out}, stopping)
                read_answers(out, reader, prompts=lines)
        except UsageError as error:
            raise RunError(f"--write-with: {error.args[0]}; correct the command, and resume") from None
        except KeyboardInterrupt:
            if not stopping():
                raise
            return False
        return True

    if not on_main(write):
        return None
    with raise_on_all_ranks():
        return read_answers(path, reader, prompts=lines).rows


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of a command and of what it started, by force after `_GRACE` seconds."""
    for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):  # nothing is left
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _run(command: str, places: Mapping[str, Path], stopping: Callable[[], bool]) -> None:
    """Run the command to its end. RunError: it failed. KeyboardInterrupt: a stop was requested."""
    words = shlex.split(command)
    for name, place in places.items():
        words = [each.replace(name, str(place)) for each in words]
    own = {name: each for name, each in os.environ.items() if _LAUNCHER.fullmatch(name) is None}
    with tempfile.TemporaryFile() as output:
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "env": own}
        try:
            process = subprocess.Popen(words, start_new_session=True, **how)
        except OSError as error:
            raise RunError(f"--write-with: {printable(words[0])} cannot be started: {error.strerror}") from None
        try:
            while process.poll() is None:
                if stopping():
                    raise KeyboardInterrupt
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_WAIT)
        except BaseException:
            _end(process)
            raise
        if process.returncode or not places["{out}"].exists():
            output.seek(max(0, output.seek(0, 2) - _CHARACTERS))
            last = output.read().decode(errors="replace").splitlines()[-_LINES:]
            shown = " | ".join(printable(each) for each in last if each.strip())
            what = f"ended with {process.returncode}" if process.returncode else "wrote no {out}"
            raise RunError(f"--write-with: the command {what}; the same command resumes here; its last lines: {shown}")
