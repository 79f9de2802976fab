"""The same commands by two trees, and whether they end with the same bits: `make same-bits BEFORE=COMMIT`.

Each case is a chain of short commands: captures by every codec, runs from every source and in every mode, two ranks, a
resume, a rollback, a sweep. The tree of the commit and this one run it, each in a folder of its own. All that they
leave is compared: every data set of the caches, every tensor of the last checkpoints and of the exported students with
the files beside it, what was logged, and the result. In the cases "begun before" the tree of the commit begins a run,
is killed, and this tree resumes it. Two trees with the same code are refused: they would show nothing.

What it gives up: it needs both trees to take the same options, and it sees a few steps of tiny models.
All cases take 5 to 10 minutes on two cores. `--keep FOLDER` keeps what BEFORE made for the next time.
"""

import argparse
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
SHORT = ("--seq-len", "32", "--num-workers", "0", "--validation-sequences", "8")
TEXT = ("--data", "corpus", *SHORT)
CAPTURE = ("cache-teacher", "--teacher", "teacher", "--num-sequences", "40", "--precision", "fp32")
RUN = (
    *("--warmup-steps", "0", "--lr", "1e-2", "--batch-size", "6", "--micro-batch-size", "3", "--steps", "10"),
    *("--checkpoint-freq", "3", "--eval-freq", "4", "--log-to", "none"),
)
FP32 = (*RUN, "--precision", "fp32", "--no-compile")
ADAPTIVE = (
    *("--precision", "mxfp4", "--time-resume", "--quant-rule", "loss+gap", "--quant-loss-threshold", "0.42"),
    *("--quant-window-size", "3", "--quant-probe-every", "2", "--quant-min-dwell", "2"),
)


@dataclass(frozen=True)
class Step:
    """One command: its words, the fault that ends it, its number of ranks, and what is compared of it."""

    words: tuple[str, ...]
    fault: str = ""
    ranks: int = 1
    by: str = "each"
    """`before`: the tree BEFORE runs it in both folders."""


def capture(out: str, *options: str, data: str = "corpus", **how: Any) -> Step:
    """Make the step that caches the tiny teacher."""
    return Step((*CAPTURE, "--data", data, *SHORT, "--out", out, *options), **how)


FIXED = ("--alpha", "0.9")
"""The default before 0.3; a run that began with it keeps it."""


def distill(
    out: str,
    *options: str,
    cache: str | None = "cache",
    student: str = "student.toml",
    alpha: tuple[str, ...] = FIXED,
    **how: Any,
) -> Step:
    """Make the step of a run of ten steps."""
    source = () if cache is None else ("--cache", cache)
    return Step(("distill", *source, "--student", student, "--out", out, *alpha, *options), **how)


TOP = ("--top-k", "12", "--num-samples", "0")
SAMPLES = capture("cache", "--num-samples", "20")
KILLED = "train.after-step:kill:7"
CASES: dict[str, tuple[Step, ...]] = {
    "samples": (SAMPLES, distill("run", *FP32)),
    "top-k at a likelihood temperature": (
        capture("cache", *TOP),
        distill("run", *FP32, "--temperature", "2", "--temperature-mode", "likelihood"),
    ),
    "top-k and samples, reverse divergence": (
        capture("cache", "--top-k", "8", "--num-samples", "24"),
        distill("run", *FP32, "--tail", "control-variate"),
    ),
    "dense": (capture("cache", "--dense"), distill("run", *FP32, "--divergence", "jsd")),
    "online teacher with hidden states": (
        distill(
            "run", *TEXT, "--num-sequences", "40", "--teacher", "teacher", "--hidden-loss", "mse", *FP32, cache=None
        ),
    ),
    "fp8": (SAMPLES, distill("run", *RUN, "--precision", "fp8", "--fp8-backend", "emulated", "--no-compile")),
    "adaptive mxfp4": (SAMPLES, distill("run", *FP32[:-3], *ADAPTIVE, "--no-compile")),
    "compiled bf16": (SAMPLES, distill("run", *RUN, "--precision", "bf16")),
    "LoRA": (SAMPLES, distill("run", *FP32, "--lora-rank", "4", "--lora-dropout", "0.1", student="teacher")),
    "a mixture of three": (
        SAMPLES,
        capture("second", *TOP, "--seed", "3"),
        distill("run", "--cache", "second", "--cache-weights", "3,1", *FP32),
    ),
    "two ranks": (
        capture("cache", "--num-samples", "20", "--sequences-per-shard", "8", ranks=2),
        distill("run", *FP32, ranks=2),
    ),
    "two ranks, sharded": (SAMPLES, distill("run", *FP32, "--parallel", "fsdp", ranks=2)),
    "killed and resumed": (
        capture("cache", *TOP, "--sequences-per-shard", "8", fault="cache.shard.before-close:kill:3"),
        capture("cache", *TOP, "--sequences-per-shard", "8"),
        distill("run", *FP32, "--temperature", "2", "--temperature-mode", "adversarial", fault=KILLED),
        distill("run", *FP32, "--temperature", "2", "--temperature-mode", "adversarial"),
    ),
    "a rollback": (SAMPLES, distill("run", *FP32, "--steps", "24", fault="train.loss:x30:14-16")),
    "merged and cut": (
        capture("a", "--num-samples", "20"),
        Step(("cache-teacher", "--teacher", "teacher", "--refine", "a", "--precision", "fp32", "--out", "b")),
        Step(("merge", "a", "b", "--out", "both")),
        Step(("subset", "both", "--out", "cut", "--rows", "0:24")),
        distill("run", *FP32, cache="cut"),
    ),
    "another tokenizer": (
        capture("cache", "--num-samples", "0", "--top-k", "20"),
        distill("run", *FP32, "--cross-tokenizer", student="other"),
    ),
    "alpha by withheld text": (
        capture("cache", "--num-samples", "20", "--validation-sequences", "72"),
        distill("run", *FP32, "--steps", "24", alpha=("--alpha", "auto")),
    ),
    "warm-up": (SAMPLES, distill("run", *FP32, "--warmup-steps", "4")),
    "WSD with its decay": (
        SAMPLES,
        distill("run", *FP32, "--lr-schedule", "wsd", "--decay-steps", "4", "--decay-shape", "1-sqrt"),
    ),
    "conversations with masks": (
        capture("cache", "--num-samples", "20", "--document-mask", data="chat.jsonl"),
        distill("run", *FP32),
    ),
    "a sweep of one arm": (Step(("sweep", "sweep.toml", "--out", "sweep")),),
    "begun before": (
        capture("cache", "--num-samples", "20", by="before"),
        distill("run", *FP32, fault=KILLED, by="before"),
        distill("run", *FP32, alpha=()),
    ),
    "begun before, another tokenizer": (
        capture("cache", "--num-samples", "20", by="before"),
        distill("run", *FP32, "--cross-tokenizer", student="other", fault=KILLED, by="before"),
        distill("run", *FP32, "--cross-tokenizer", student="other", alpha=()),
    ),
    "begun before, adaptive": (
        capture("cache", "--top-k", "8", "--num-samples", "24", by="before"),
        distill("run", *FP32[:-3], *ADAPTIVE, "--no-compile", fault=KILLED, by="before"),
        distill("run", *FP32[:-3], *ADAPTIVE, "--no-compile", alpha=()),
    ),
}
SWEEP = """
[caches.c]
teacher = "teacher"
data = "corpus"
seq_len = 32
num_sequences = 24
validation_sequences = 8
num_workers = 0
precision = "fp32"
[common]
student = "student.toml"
cache = "c"
steps = 4
batch_size = 6
alpha = 0.9
warmup_steps = 0
compile = false
precision = "fp32"
log_to = "none"
[arms.kd]
"""
MEASURED = {
    *("seconds", "tokens_per_second", "tok/s", "tok/s_last", "eta_h", "data_wait_s", "peak_memory_mb"),
    *("memory_growth_mb", "memory_resident_mb"),
}
"""Keys, by their whole names, of times and memory, which two equal runs need not share."""
OF_A_VERSION = {"digest", "versions", "parents", "of", "cache", "sha256", "index_sha256"}
"""Keys that name kdtrain's version, or digests that hold it: left out where the trees have two versions."""
CARD = "README.md"
"""The card of an exported student, which is not compared, nor is its digest."""


class Tree:
    """An interpreter that has imported the kdtrain of one checkout, and forks for each command."""

    def __init__(self, checkout: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        env |= {"KDTRAIN_HOME": tempfile.mkdtemp()}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, step: Step) -> int:
        """Run one command in `folder`, and return the largest exit code of its ranks."""
        request = {"folder": str(folder), "words": step.words, "fault": step.fault, "ranks": step.ranks}
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


def worker() -> None:
    """Answer each line of stdin, a command, with its exit code."""
    import torch
    import transformers

    import kdtrain.cli
    from kdtrain import faults

    assert torch and transformers and Path(kdtrain.cli.__file__).is_relative_to(os.environ["PYTHONPATH"])
    for line in sys.stdin:
        asked = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(asked["ranks"]):
            if not (child := os.fork()):
                log = os.open(os.path.join(asked["folder"], "log.txt"), os.O_CREAT | os.O_APPEND | os.O_WRONLY)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.chdir(asked["folder"])
                os.environ["KDTRAIN_FAULT"] = asked["fault"]
                if asked["ranks"] > 1:
                    many = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": asked["ranks"], "MASTER_PORT": port}
                    os.environ |= {name: str(value) for name, value in many.items()} | {"MASTER_ADDR": "127.0.0.1"}
                    os.environ["LOCAL_WORLD_SIZE"] = str(asked["ranks"])
                faults.read()
                print("$ kdtrain", *asked["words"], flush=True)
                try:
                    kdtrain.cli.main(list(asked["words"]))
                    code = 0
                except SystemExit as ended:
                    code = ended.code if isinstance(ended.code, int) else 1
                finally:
                    sys.stdout.flush()
                os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(max(abs(code) for code in codes), flush=True)


def prepare(folder: Path) -> None:
    """Write the teacher, the student and the text of every case."""
    from transformers import AutoTokenizer

    from kdtrain.testing import SHAPES, tiny_model, tiny_tokenizer, write_model_folder

    write_model_folder(folder / "teacher", tiny_model(vocab_size=300, seed=1), tiny_tokenizer(300))
    tokenizer = tiny_tokenizer(300)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder / "teacher")
    turns = [[("user", "why? " * (n * 7 % 19 + 1)), ("assistant", "because. " * (n * 5 % 11 + 1))] for n in range(60)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in turns]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sweep.toml").write_text(SWEEP)
    longer = AutoTokenizer.from_pretrained(HERE / "teachers/stdlib-5m")
    write_model_folder(folder / "other", tiny_model(vocab_size=len(longer), seed=2), longer)
    config = {**SHAPES["qwen3"], "vocab_size": 300}
    lines = ['name = "student"', 'init = "scratch"', "[config]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in config.items()]
    (folder / "student.toml").write_text("\n".join(lines) + "\n")
    (folder / "corpus").mkdir()
    for number in range(60):
        text = "".join(
            f"line {number * line % 97} of text {line * line % 31} and more\n" for line in range(8 + number % 5)
        )
        (folder / "corpus" / f"{number:02}.txt").write_text(text)


def tensors(path: Path) -> dict[str, Any]:
    """Read every tensor of a safetensors file: its type, shape and bytes."""
    import torch
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        each = {name: file.get_tensor(name).contiguous() for name in file.keys()}  # noqa: SIM118
    return {k: (str(t.dtype), tuple(t.shape), t.flatten().view(torch.uint8).numpy().tobytes()) for k, t in each.items()}


def contents(folder: Path) -> dict[str, Any]:
    """Read what is compared of the caches, runs and exported students below `folder`, each part by its name."""
    import h5py
    import hdf5plugin  # noqa: F401

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("**/shards/*.h5")):
        with h5py.File(path) as file:
            names: list[str] = []
            file.visit(names.append)
            arrays = {f"{path.relative_to(folder)}:{name}": file[name] for name in names}
            found |= {name: each[()].tobytes() for name, each in arrays.items() if isinstance(each, h5py.Dataset)}
    compared = [each.parent / "manifest.json" for each in folder.glob("**/index.h5")]
    for checkpoints in folder.glob("**/checkpoints"):
        run = checkpoints.parent
        newest = max(checkpoints.glob("step-*"), key=lambda each: each.name)
        found[f"{newest.relative_to(folder)}: progress"] = json.loads((newest / "state.json").read_text())["progress"]
        compared += [*newest.glob("*.safetensors"), run / "metrics.jsonl", run / "result.json"]
        compared += [each for each in (run / "student").rglob("*") if each.is_file() and each.name != CARD]
    for path in sorted(compared):
        name, text = str(path.relative_to(folder)), path.read_bytes()
        if path.suffix == ".safetensors":
            found |= {f"{name}:{key}": each for key, each in tensors(path).items()}
        elif path.suffix == ".jsonl":
            found |= {f"{name}:{place}": json.loads(line) for place, line in enumerate(text.splitlines())}
        elif path.suffix == ".json":
            found |= {f"{name}: {key}": {key: each} for key, each in json.loads(text).items()}
        elif path.suffix == ".toml":
            found[name] = tomllib.loads(text.decode())  # its comment has the version
        else:
            found[name] = text
    return found


def different(before: dict[str, Any], after: dict[str, Any], left_out: set[str]) -> list[str]:
    """List the names whose values differ, but for keys that are called as one of `left_out`."""

    def steady(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: steady(each) for key, each in value.items() if key not in left_out}
        return [steady(each) for each in value] if isinstance(value, list) else value

    return [name for name in sorted({*before, *after}) if steady(before.get(name)) != steady(after.get(name))]


def main() -> int:
    """Run the cases, print a line for each, and return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("before", type=Path, nargs="?", help="a checkout of the other commit")
    parser.add_argument("--only", default="", help="cases with these words in their names, comma separated")
    parser.add_argument("--keep", type=Path, help="a folder for what BEFORE makes, used again if it is there")
    parser.add_argument("--after", type=Path, default=HERE, help="the checkout to compare; this one by default")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return 0
    if options.before is None:
        parser.error("name a checkout of the commit to compare with")
    sys.path.insert(0, str(options.after))
    work = Path(tempfile.mkdtemp())
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    codes = [
        {
            path.relative_to(each): path.read_bytes()
            for part in ("kdtrain", "students", "teachers")
            for path in each.glob(f"{part}/**/*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        for each in checkouts.values()
    ]
    if codes[0] == codes[1]:
        parser.error(f"{options.before} has the code of this tree: name a commit from before the change")
    versions = {re.findall(rb"__version__ = .*", each[Path("kdtrain/__init__.py")])[0] for each in codes}
    left_out = {*MEASURED, CARD, *(OF_A_VERSION if len(versions) > 1 else ())}
    kept = options.keep or work / "before"
    trees = {side: Tree(checkout) for side, checkout in checkouts.items()}
    if not (kept / "material").exists():
        (kept / "material").mkdir(parents=True)
        prepare(kept / "material")
    wanted = [each for each in options.only.split(",") if each]
    failed = 0
    for name, steps in CASES.items():
        if wanted and not any(each in name for each in wanted):
            continue
        started = time.monotonic()
        folders = {"before": kept / name.replace(" ", "-"), "after": work / name.replace(" ", "-")}
        wrong: list[str] = []
        for side, folder in folders.items():
            if side == "before" and (folder / "done").exists():
                continue
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(kept / "material", folder)
            for step in steps:
                code = trees["before" if step.by == "before" else side].run(folder, step)
                expected = 9 if ":kill:" in step.fault else 0
                if code != expected:
                    tail = (folder / "log.txt").read_text().splitlines()[-1:]
                    wrong.append(f"{side}: exit code {code} of kdtrain {' '.join(step.words)}: {' '.join(tail)}")
                    break
            else:
                (folder / "done").touch()
        if not wrong:
            found = [contents(folder) for folder in folders.values()]
            wrong = different(*found, left_out) or ([] if len(found[0]) > 5 else ["nothing to compare"])
        failed += bool(wrong)
        print(f"{'DIFFERS' if wrong else 'same   '} {name} ({time.monotonic() - started:.0f} s)", flush=True)
        for line in {each.partition(":")[0]: each for each in reversed(wrong)}.values():  # the first of each file
            print("   ", line, flush=True)
        if not wrong:
            shutil.rmtree(folders["after"])
    for tree in trees.values():
        tree.process.stdin.close()  # type: ignore[union-attr]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
