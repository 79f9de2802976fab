"""Make the teacher that ships, tokenizer included: `make teacher`, or `python teachers/make_teacher.py`.

The teacher is an ordinary run of `kdtrain distill` in its plain cross-entropy form: a run that is interrupted goes
on when the command is given again. The best checkpoint is exported in bf16 into `teachers/stdlib-5m`, measured on
the validation and test splits, and its model card is written from what was measured. Takes one to two hours on two
cores. `--publish RUN` leaves the training out and publishes a run that is there.

On a faster machine the recipe can be trained for longer (`--steps`, `--batch-size`; the decay stays the same part of
the whole). `--if-better` measures the teacher that ships on the same text first, and publishes the new one only if its
validation loss is lower; `--keep-tokenizer` leaves the tokenizer alone, which caches and students of others depend on.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEACHER = ROOT / "teachers" / "stdlib-5m"
RUN = ROOT / "teachers" / "build" / "stdlib-5m"
SEQ_LEN = 512
RECIPE = {
    "--steps": "4200",
    "--batch-size": "8",
    "--seq-len": str(SEQ_LEN),
    "--validation-sequences": "200",
    "--lr": "2e-3",
    "--min-lr": "2e-5",
    "--lr-schedule": "wsd",
    "--warmup-steps": "200",
    "--decay-steps": "1500",
    "--decay-shape": "1-sqrt",
    "--checkpoint-freq": "500",
    "--eval-freq": "500",
    "--log-freq": "50",
}

CARD = """# stdlib-5m

The teacher that ships with kdtrain: a small language model of Python source text, made so that the whole path from
teacher to student can be run and measured on a machine without a network. It is not meant for anything else.

| | |
|---|---|
| architecture | Llama: {parameters:,} parameters, 6 layers, width 256, 4 heads, tied embeddings, 1,024 positions |
| tokenizer | byte-level BPE, 2,048 entries, trained on the train split (`teachers/make_tokenizer.py`) |
| text | source and documentation of the standard library of Python {python} without its `test` packages |
| splits | train 90, validation 5, test 5 by a hash of the relative path |
| training | cross-entropy, {tokens:,} tokens, {steps:,} steps of {batch} x {seq_len}, AdamW, rate {lr}, WSD |
| weights | bf16, safetensors |
| validation | **{validation[loss]:.4f} nats a token**, perplexity {validation[perplexity]:.2f} |
| test | {test[loss]:.4f} nats a token, perplexity {test[perplexity]:.2f} |

Losses were measured with `kdtrain evaluate --data stdlib --seq-len {seq_len}` on these weights. The text it learned
from is under the PSF licence. `make teacher` makes tokenizer and teacher again.
"""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Train, unless a run to publish is given, then export, measure and write the card; the verdict."""
    options = _parser().parse_args(argv)
    run = options.publish or train(options)
    export = run.with_name(f"{run.name}-export")
    kdtrain("export", str(run), "--out", str(export), "--dtype", "bfloat16", "--overwrite")
    verdict: dict[str, Any] = {"published": True}
    if options.if_better:
        shipped, made = (evaluate(str(each), "validation")["loss"] for each in (TEACHER.with_suffix(".toml"), export))
        verdict = {"published": made < shipped, "shipped_loss": shipped, "made_loss": made}
    if verdict["published"]:
        shutil.copytree(export, TEACHER, dirs_exist_ok=True)
        spec = str(TEACHER.with_suffix(".toml"))
        measured = {split: evaluate(spec, split) for split in ("validation", "test")}
        (TEACHER / "README.md").write_text(card(run, measured))
        print(f"{TEACHER.name}: validation loss {measured['validation']['loss']:.4f}", file=sys.stderr)
    print(json.dumps(verdict))
    return verdict


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--publish", type=Path, help="a finished run to publish instead of training one")
    parser.add_argument("--run", type=Path, default=RUN, help="the folder to train in")
    parser.add_argument("--steps", type=int, default=int(RECIPE["--steps"]), help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=int(RECIPE["--batch-size"]), help="sequences in a step")
    parser.add_argument("--keep-tokenizer", action="store_true", help="train on the tokenizer that ships")
    parser.add_argument("--if-better", action="store_true", help="publish only what has a lower validation loss")
    return parser


def train(options: argparse.Namespace) -> Path:
    """Make the tokenizer and train the teacher; the folder of the run."""
    if not options.keep_tokenizer:
        subprocess.run([sys.executable, str(ROOT / "teachers" / "make_tokenizer.py"), str(TEACHER)], check=True)
    flags = [word for pair in recipe(options.steps, options.batch_size).items() for word in pair]
    student = str(ROOT / "students" / "stdlib-5m.toml")
    kdtrain("distill", "--data", "stdlib", "--student", student, "--out", str(options.run), *flags)
    run: Path = options.run
    return run


def recipe(steps: int, batch_size: int) -> dict[str, str]:
    """Scale the recipe to another number of steps: warm-up and decay stay the same parts of the whole."""
    parts = ("--warmup-steps", "--decay-steps", "--checkpoint-freq", "--eval-freq")
    scaled = {name: str(max(round(int(RECIPE[name]) * steps / int(RECIPE["--steps"])), 1)) for name in parts}
    return RECIPE | scaled | {"--steps": str(steps), "--batch-size": str(batch_size)}


def evaluate(spec: str, split: str) -> dict[str, Any]:
    """Measure loss, perplexity and calibration of the published weights on all of a split."""
    return kdtrain("evaluate", "--student", spec, "--data", "stdlib", "--split", split, "--seq-len", str(SEQ_LEN))


def card(run: Path, measured: dict[str, dict[str, Any]]) -> str:
    """Fill the model card, every number in it read from the run or measured."""
    described = kdtrain("inspect", str(run))
    checkpoint = kdtrain("inspect", str(run / "checkpoints" / described["best"]))
    options = checkpoint["options"]
    environment = json.loads((run / "environment.json").read_text())
    return CARD.format(
        parameters=described["student"]["parameters"],
        python=environment["python"],
        tokens=checkpoint["tokens"],
        steps=checkpoint["step"],
        batch=options["run"]["batch_size"],
        seq_len=options["data"]["seq_len"],
        lr=options["optimizer"]["lr"],
        **measured,
    )


def kdtrain(*words: str) -> dict[str, Any]:
    """Run a command, its progress on stderr, and give back its result."""
    argv = [sys.executable, "-m", "kdtrain", *words, "--json"]
    done = subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


if __name__ == "__main__":
    main()
