"""The commands, flags, links and files that README and docs name exist."""

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kdtrain as kd
from benchmarks.performance import scaling
from kdtrain import cli
from kdtrain.cache.format.spec import CodecSpec
from kdtrain.cli.help import help_of
from kdtrain.config.commands import CacheTeacherConfig, DistillConfig
from kdtrain.config.removed import REMOVED
from kdtrain.config.values import fields_of, flag, marked
from kdtrain.models.loading import load_student
from kdtrain.models.spec import ModelSpec
from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.monitor.rules import RULES
from kdtrain.parallel.memory_plan import ModelFootprint
from kdtrain.plugins.loggers.on_event import EVENTS
from kdtrain.plugins.rounds import figures as figures  # which has rules of its own
from kdtrain.run.capture import computed_bytes, computed_rates

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
STUDIES = sorted((ROOT / "benchmarks").rglob("*.md"))
"""Methods and whole tables, beside the records that they are of."""
TORCHRUN = {
    *("--standalone", "--nnodes", "--nproc-per-node", "--max-restarts"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
}
ELSEWHERE = {
    *("--kl-divergence", "--no-deps", "--seeds", "--model", "--upgrade", "--logdir", "--port", "--tiny", "--profile"),
    *("--commit", "--budget", "--from", "--again", "--only", "--present"),
    *("--max-logprobs", "--max-model-len", "--no-enable-prefix-caching", "--logprobs-mode"),
}
ELSEWHERE |= TORCHRUN
"""Flags of commands other than kdtrain."""

SLURM = ROOT / "docs" / "distill.sbatch"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, kind: str = "") -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@functools.cache
def nodes() -> list[ast.AST]:
    """Parse the syntax of all code of the package."""
    return [node for path in (ROOT / "kdtrain").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]


cli.COMMANDS.help()  # imports the plugins


def commands(pages: list[Path] = PAGES) -> list[str]:
    """List the commands in blocks of code, fenced or indented, that can be typed as they stand."""
    lines = []
    for page in pages:
        lines += [line for block in blocks(page, "(?:sh)?") for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"^    ((?:kdtrain|torchrun) .*)", page.read_text().replace("\\\n", " "), re.MULTILINE)
    lines = [re.sub(r"^torchrun .*? -m kdtrain ", "kdtrain ", line) for line in lines]
    return [line for line in lines if line.startswith("kdtrain ") and " ... " not in line]


def flags_of(kind: type) -> set[str]:
    flags = {flag(option.name) for _, option in fields_of(kind)}
    return flags | {"--help", "--version"} | {each.replace("--", "--no-", 1) for each in flags}


def flags_of_kdtrain() -> set[str]:
    return {each for command in cli.COMMANDS.entries.values() for each in flags_of(command.config)}


@pytest.mark.parametrize("line", commands())
def test_a_command_in_the_pages_is_one_that_kdtrain_takes(line):
    _, command, *argv = shlex.split(line)
    assert cli.parse(command, argv) is not None


@each_page
def test_a_command_that_a_sentence_names_exists_and_takes_the_flags_beside_it(page):
    names = "|".join(cli.COMMANDS.entries)
    for name, rest in re.findall(
        rf"`(?:kdtrain (?=[a-z])|(?=(?:{names})[ `]))([a-z-]+)((?: [^`]*)?)`", page.read_text()
    ):
        assert set(re.findall(r"(?<![\w-])--[a-z-]+", rest)) <= flags_of(cli.COMMANDS.get(name).config), (name, rest)


def test_the_main_job_is_in_the_readme_and_in_five_minutes():
    lines = commands([PAGES[0]])
    real, small = ["cache-teacher", "distill", "export"], ["cache-teacher", "distill", "evaluate"]
    assert [line.split()[1] for line in lines] == real + small
    five = commands([ROOT / "docs" / "five-minutes.md"])
    assert set(lines[3:]) <= set(five) and "export" in {line.split()[1] for line in five}


def test_the_readme_is_short_and_every_page_is_linked_from_it():
    text = PAGES[0].read_text()
    assert len(text.splitlines()) <= 120
    pages = {str(each.relative_to(ROOT)) for each in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.ipynb")]}
    assert pages - set(re.findall(r"\]\(([^)#:]+)\)", text)) == set()


@each_page
def test_every_flag_that_a_page_names_exists(page):
    text = re.sub(r"pip install [^`]*|pytest [^`|]*|hf download [^`\n]*", "", page.read_text())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text))
    assert named - flags_of_kdtrain() - ELSEWHERE == set()


def test_the_changelog_names_every_option_that_is_gone():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert {flag(key.split()[0]) for key in REMOVED} - set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", text)) == set()


def test_every_flag_that_a_message_names_exists():
    texts = [node.value for node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    named = {each for text in texts for each in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", text)}
    assert {"--max-loss-ratio", "--explosion-threshold"} <= named
    assert named - flags_of_kdtrain() - ELSEWHERE == set()


@pytest.mark.parametrize("page", PAGES + STUDIES, ids=lambda page: page.name)
def test_every_link_into_the_repository_has_a_target(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@functools.cache
def kinds_of_events() -> set[str]:
    """Find the kinds in calls of `event`, `warning` and `warn_early`, and of functions that pass their `kind` on."""
    position = {"event": 0, "warning": 0, "warn_early": 0, "_warn": 0}
    for node in nodes():
        if isinstance(node, ast.FunctionDef) and "kind" in (names := [each.arg for each in node.args.args]):
            calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
            passed = [kind for call in calls for kind in argument(call, position) if getattr(kind, "id", "") == "kind"]
            if passed:
                position[node.name] = names.index("kind") - (names[0] == "self")
    found = [kind for node in nodes() if isinstance(node, ast.Call) for kind in argument(node, position)]
    parts = [each for kind in found for each in ast.walk(kind)]  # "start" if ... else "resume"
    return {each.value for each in parts if isinstance(each, ast.Constant) and isinstance(each.value, str)}


def argument(call: ast.Call, position: dict[str, int]) -> list[ast.expr]:
    """Return the argument of a call that is the kind of an event, if it is such a call."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    owner = getattr(call.func, "value", None)
    if getattr(owner, "id", "") == "log" or isinstance(owner, ast.Call):  # a logger's warning is no event
        return []
    return call.args[position[name] :][:1] if name in position else []


def test_the_tables_of_warnings_and_events_have_every_kind_that_is_written_and_no_other():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    section = page[page.index("## Warnings") : page.index("## TensorBoard")]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    documented = [kind for cell in cells for kind in re.findall(r"`([a-z-]+)`", cell)]
    assert len(documented) == len(set(documented))
    found = kinds_of_events()
    assert {"rollback", "recovery", "spike", "lost-config", "disk-full", "save", "checkpoint"} <= found
    assert set(documented) == found | RULES.keys() - {"stalled"}, "a run that stalls cannot say so"


def test_the_pages_list_the_options_that_may_change_on_a_resume_and_those_that_may_differ_between_ranks():
    def flags(text: str) -> set[str]:
        return set(re.findall(r"`(--[a-z0-9-]+)`", text))

    resuming, ranks = ((ROOT / "docs" / name).read_text() for name in ("resuming.md", "multi-node.md"))
    table = resuming[resuming.index("On a resume these options may differ") : resuming.index("Raising `--steps`")]
    assert flags(table) == {flag(name) for name in marked(DistillConfig, "free")}
    (listed,) = re.findall(r"names the difference\nand the rank\.([^.]*)may differ\.", ranks)
    assert flags(listed) == {flag(name) for name in marked(DistillConfig, "per_rank")}


def test_the_page_names_the_events_for_which_the_command_of_on_event_runs():
    page = (ROOT / "docs" / "monitoring.md").read_text()
    (text,) = re.findall(r"runs the command at each (.*?), and at every\nevent of level `error`", page)
    assert set(re.findall(r"`([a-z-]+)`", text)) == EVENTS


def test_the_example_of_a_student_is_a_spec(tmp_path):
    (example,) = blocks(ROOT / "docs" / "models.md", "toml")
    assert tomllib.loads(example)["tokenizer"] == "stdlib-5m"
    (tmp_path / "small.toml").write_text(example)
    spec = ModelSpec.read(str(tmp_path / "small.toml"))
    assert Path(spec.tokenizer, "tokenizer.json").is_file()
    assert (spec.name, spec.init) == ("small", "scratch")


def test_the_example_of_a_student_with_a_tokenizer_of_its_own_works(tmp_path, monkeypatch):
    page = ROOT / "docs" / "tokenizers.md"
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text(page.read_text())
    exec(blocks(page, "python")[0])
    Path("students/other.toml").write_text(blocks(page, "toml")[0])
    student = ModelSpec.read("students/other.toml")
    vocabulary = len(load_tokenizer(student))
    model = load_student(student, vocab_size=vocabulary, seed=0, device="cpu")
    assert 256 < vocabulary <= 4096 and model.get_input_embeddings().weight.shape == (vocabulary, 128)


def test_the_flags_of_torchrun_are_torchruns():
    from torch.distributed.run import get_args_parser

    known = {flag for action in get_args_parser()._actions for flag in action.option_strings}
    assert known >= TORCHRUN
    assert set(re.findall(r"^    (--[a-z-]+) ", SLURM.read_text(), re.MULTILINE)) <= TORCHRUN


def test_the_list_of_doubles_names_files_that_there_are():
    names = set(re.findall(r"`([\w/-]+\.(?:py|json))`", (ROOT / "tests" / "README.md").read_text()))
    assert len(names) > 20 and [each for each in names if not (ROOT / "tests" / each).exists()] == []


def test_the_slurm_script_is_one_and_starts_kdtrain_once_a_device():
    subprocess.run(["bash", "-n", SLURM], check=True)
    asked = subprocess.run(["bash", SLURM], capture_output=True, text=True)
    assert (asked.returncode, asked.stderr.split()[0]) == (2, "usage:")
    folder = SLURM.parent / "unwritten"
    scripts = 'scontrol() { echo node-1; echo node-2; }; srun() { echo "$@"; }; export -f scontrol srun; '
    variables = {
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    said = subprocess.run(
        ["bash", "-c", f"{scripts} bash {SLURM} distill --out {folder}"],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **variables},
        check=True,
    ).stdout
    assert "--nnodes 2 --nproc-per-node 8" in said and "--rdzv-endpoint node-1:29400 --rdzv-id 7-0" in said
    assert said.split()[-5:] == ["-m", "kdtrain", "distill", "--out", str(folder)]


def test_the_figures_of_the_pages_on_scaling_are_those_of_their_script():
    for page, text in scaling.filled().items():
        assert text == page.read_text(), page


def test_the_defaults_of_the_knobs_are_those_of_the_command():
    fields = [each for kind in (CacheTeacherConfig, DistillConfig) for _, each in fields_of(kind)]
    defaults = {flag(each.name): each.default for each in fields}  # what both have is distill's
    words = {
        "None": {"all", "none", "the batch", "50, or 0 with `--top-k`", "2,000"},
        "False": {"off"},
        "True": {"compiled"},
        "()": {"the sizes of several `--cache`"},
    }
    rows = re.findall(r"^\| `(--[a-z-]+)` \| ([^|]*) \|", (ROOT / "docs" / "knobs.md").read_text(), re.MULTILINE)
    assert len(rows) > 30
    for name, said in rows:
        default = defaults[name if name in defaults else name.replace("--no-", "--")]
        assert said in words.get(repr(default), {str(default), str(default).removesuffix(".0")}), name


@pytest.mark.parametrize("name, known", [("knobs.md", "learned-samples"), ("troubleshooting.md", "no-gain")])
def test_the_warnings_that_advice_names_are_written_by_a_run(name, known):
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", (ROOT / "docs" / name).read_text()))
    others = {"cache-teacher", "no-progress", "skew-kl", "reverse-kl", "forward-kl"}
    assert known in named and named - kinds_of_events() - RULES.keys() - others == set()


def loaded_from_elsewhere(html: str) -> list[str]:
    """Find what a browser would get from another host for a page, other than links that a reader follows."""
    tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", html)
    return [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)]


def test_a_page_that_loads_something_from_another_host_is_found():
    assert loaded_from_elsewhere('<link rel="stylesheet" href="https://fonts.example/x.css">')
    assert not loaded_from_elsewhere('<a href="https://example.org">')


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_site_builds_strictly_and_loads_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert {page.stem for page in PAGES[2:]} <= {page.stem for page in pages}
    assert {page.name: found for page in pages if (found := loaded_from_elsewhere(page.read_text()))} == {}
    assert 'src="repository/benchmarks/figures/quality-gap.png"' in (site / "index.html").read_text()


def test_the_reference_has_every_option_and_every_name_of_the_library(site):
    options, library = ((site / "reference" / f"{name}.html").read_text() for name in ("options", "library"))
    fields = [each for command in cli.COMMANDS.entries.values() for _, each in fields_of(command.config)]
    assert {flag(each.name) for each in fields} - set(re.findall(r"<code>(--[a-z0-9-]+)</code>", options)) == set()
    assert "<td>Factor on the learning rate at each rollback.</td>" in options
    assert {each for each in kd.__all__ if not re.search(rf'id="kdtrain(\.plugins[\w.]*)?\.{each}"', library)} == set()


@pytest.mark.slow
def test_the_notebook_runs_with_fewer_sequences_and_steps(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    for name in ("teachers", "students"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "docs" / "cache-to-figure.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    names: dict = {}
    for whole, part in (
        ("num_sequences=640", "num_sequences=64"),
        ("steps=80", "steps=16"),
        ("warmup_steps=20", "warmup_steps=4"),
    ):
        assert source.count(whole) == 1
        source = source.replace(whole, part)
    exec(compile(source, "cache-to-figure.ipynb", "exec"), names)
    assert (tmp_path / "runs" / "notebook" / "figure.png").stat().st_size > 10_000
    for result in names["results"].values():
        assert result["best_validation_loss"] < result["first_validation_loss"] - 0.3


WORDS = {
    "five-minutes": ("cpu",),
    "first-real-model": ("chat",),
    "troubleshooting": ("oom", "nan"),
    "monitoring": ("wandb",),
    "resuming": ("resume", "checkpoint"),
    "on-disk": ("disk",),
    "models": ("gguf", "moe", "quantize"),
    "vllm": ("vllm",),
    "lora": ("lora",),
    "tokenizers": ("tokenizer",),
    "temperature": ("temperature",),
    "precision": ("fp8",),
    "multi-node": ("multi-node", "slurm", "nccl"),
    "scaling": ("fsdp",),
}
"""What people type into the site's search, by the page that they want."""


@pytest.mark.parametrize("page", WORDS)
def test_a_word_that_people_search_for_is_in_a_heading_or_in_the_first_lines_of_its_page(page):
    lines = (ROOT / "docs" / f"{page}.md").read_text().lower().splitlines()
    found = " ".join([*lines[:12], *(line for line in lines if line.startswith("#"))])
    assert [word for word in WORDS[page] if not re.search(rf"(?<![a-z]){word}", found)] == []


PRIVATE = (
    r"\b(?:bytes|nats|samples|entries|tokens|numbers) a (?:token|second)\b|\b(?:GiB|GB) a (?:rank|step)\b",
    r"next token right|gone on with|goes on with|said and|not wanted any more|hurts nobody|is no (?:file|number)\b",
    r"nobody promised|of its own accord|compare only where|which runs at once share",
)
"""English that only this project would write: STYLE's table, and what readers stumbled over."""


def printed() -> list[str]:
    """Return the strings of the code that a user may read: all but docstrings, and names of keys."""
    bare = {id(node.value) for node in nodes() if isinstance(node, ast.Expr)}
    texts = [node for node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    keys = {"GiB a rank", "GB sent a step"}  # of --json, which do not change
    return [node.value for node in texts if id(node) not in bare and node.value not in keys]


@pytest.mark.parametrize("pattern", PRIVATE)
def test_pages_messages_and_help_are_in_plain_english(pattern):
    helps = [help_of(name, command.config, "all") for name, command in cli.COMMANDS.entries.items()]
    texts = [page.read_text() for page in PAGES] + printed() + [" ".join(each.split()) for each in helps]
    assert [found[0] for text in texts for found in re.finditer(pattern, text)] == []


@pytest.mark.parametrize("name", ["README.md", "docs/measured.md"])
def test_the_result_that_a_page_claims_is_that_of_the_tables(name):
    text = " ".join((ROOT / name).read_text().split())
    quality = (ROOT / "docs" / "quality.md").read_text()
    table = quality[quality.index("<!-- quality-final -->") : quality.index("<!-- /quality-final -->")]
    rows = {row[1]: row for line in table.splitlines() if (row := [cell.strip() for cell in line.split("|")])[2:]}
    for student in ("50 samples", "50 samples, alpha 1", "top-12, ghost bucket"):
        assert rows[student][9].replace("%", "") + " %" in text, student
    size, whole = float(rows["50 samples"][2]), rows["whole distributions, alpha 1"][2]
    assert f"{size:.0f} bytes" in text or f"{size} bytes" in text
    assert whole == "2,813.0" and "2,813" in text
    assert "**+0.1903 ± 0.0480**" in quality and ("0.19 nats" in text or name == "README.md")
    alpha = " ".join((ROOT / "benchmarks" / "science" / "alpha.md").read_text().split())
    found = re.search(r"of 0 and 0.9: -([\d.]+) nats in the mean of the regimes, \+([\d.]+) at most in a run", alpha)
    assert found is not None
    claim = f"{found[1]} nats below the better of both in the mean, and at most {found[2]} above it"
    assert claim in text, claim


def test_the_cost_of_a_step_in_the_readme_is_that_of_the_record():
    figures = json.loads((ROOT / "benchmarks" / "results" / "gpu" / "step.json").read_text())["figures"]
    longer = [100 / figure["rate"] - 100 for name, figure in figures.items() if "sparse" in name and "rate" in figure]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"took {min(longer):.1f} to {max(longer):.0f} % longer than kdtrain's own cross-entropy" in text
    assert any("samples" in name for name in figures) or "50 samples at T = 1, is not measured" in text
    for length in (2048, 8192):
        sides = (figures[f"{length} {side}"]["tokens_a_second"] for side in ("sparse-12", "online"))
        assert 2.8 < next(sides) / next(sides) < 3.3
    assert "a third of the time that it took with an uncompiled 8 B teacher" in text


def test_the_computed_figures_of_the_real_pair_are_those_of_the_dry_run():
    text = " ".join((ROOT / "README.md").read_text().split())
    qwen = ModelFootprint(
        name="Qwen3-1.7B",
        **{"parameters": 1_720_574_976, "active": 1_720_574_976, "layers": 28, "in_layers": 1_409_408_000},
        **{"width": 2_048, "vocabulary": 151_936, "tied": True, "kept": 0.0},
    )
    size = computed_bytes(CodecSpec(kind="sparse", vocab_size=151_936, num_samples=50))
    rates = computed_rates(qwen)
    assert f"({round(rates['NVIDIA H200'], -2):,.0f} tokens per second)" in text and f"({size} bytes per token)" in text
    minutes, hours = 1e8 / rates["NVIDIA H200"] / 60, 1e8 / rates["two CPU cores"] / 3600
    assert f"{minutes:.0f} minutes on one H200" in text and f"{hours:.0f} hours on two CPU cores" in text


def test_the_figures_of_fp8_are_those_of_the_record():
    figures = json.loads((ROOT / "benchmarks" / "results" / "gpu" / "fp8.json").read_text())["figures"]
    text = " ".join((ROOT / "docs" / "measured.md").read_text().split())
    shown = {}
    for size in ("1b", "3b"):
        kind, high = figures[f"{size} torchao-tensorwise"], figures[f"{size} bf16"]
        ratios = kind["time"], kind["memory"], kind["tokens_a_second"] / high["tokens_a_second"]
        shown[size] = [f"{100 * ratio - 100:+.1f}" for ratio in ratios]
    time, memory, rate = shown["3b"]
    assert f"time {time} ± 0.2 %, memory {memory} %, throughput {rate} %" in text
    assert "at 1 B {}, {} and {} %".format(*shown["1b"]) in text
