"""Plugins of strangers, one of each kind, by docs/library.md alone: no file of kdtrain is touched for any of them."""

import ast
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import kdtrain as kd

PACKAGES, PAGE = Path(__file__).parent / "packages", Path(__file__).parents[2] / "docs/library.md"
ENTRY_POINTS = {
    "commands": "losses = strangers",
    "divergences": "squares = strangers.parts",
    "engines": "sglang = strangers.sglang",
    "layouts": "pairs = strangers.pairs",
    "loggers": "file = strangers.parts",
    "optimizers": "muon = muon",
    "plans": "selfwritten = selfwritten",
    "sections": "selfwritten = selfwritten",
    "sources": "backwards = strangers.parts",
    "teachers": "table = strangers.parts",
    "temperatures": "halving = strangers.parts",
}
TOP = 12


@pytest.fixture(scope="module")
def strangers(forks):
    """Run kdtrain with the package installed."""
    folder = forks.root / "site"
    shutil.copytree(PACKAGES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (info := folder / "strangers-1.0.dist-info").mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n")
    groups = (f"[kdtrain.{group}]\n{line}\n" for group, line in ENTRY_POINTS.items())
    (info / "entry_points.txt").write_text("".join(groups))
    return lambda *argv: forks.run(*argv, PYTHONPATH=str(folder))


@pytest.fixture(scope="module")
def model(forks):
    """Return the teacher of the bench."""
    return AutoModelForCausalLM.from_pretrained(forks.root / "teacher").eval()


def most_likely(model, tokens):
    """Log p and ids [B, T, K] of the next token."""
    with torch.no_grad():
        return model(tokens).logits.log_softmax(-1).topk(TOP)


def assert_same_entries(cache, teachers):
    """Assert that a cache keeps what a local teacher's does."""
    for split in ("train", "validation"):
        tokens = {row["tokens"].numpy().tobytes(): row for row in teachers[split]}
        for row in cache[split]:
            known = tokens[row["tokens"].numpy().tobytes()]
            assert (row["ids"] == known["ids"])[row["loss_mask"]].float().mean() > 0.98
            close = (row["logprobs"].float() - known["logprobs"].float()).abs()[row["loss_mask"]]
            assert close.mean() < 0.01


def test_the_page_of_the_library_has_each_kind_and_every_name_that_a_package_of_all_kinds_imports():
    page = PAGE.read_text()
    table = page[page.index("| kind |") :].partition("\n\n")[0]
    assert ENTRY_POINTS.keys() <= {*re.findall(r"`kdtrain\.(\w+)` \|", table)}
    stated = {("kdtrain", name) for name in re.findall(r"\bkd\.(\w+)", page)}
    for module, names in re.findall(r"`(kdtrain\.[\w.]+)`: ((?:`\w+`(?:, )?)+)", table):
        stated |= {(module, name) for name in re.findall(r"\w+", names)}
    imported = set()
    for path in PACKAGES.rglob("*.py"):
        text = path.read_text()
        imported |= {("kdtrain", name) for name in re.findall(r"\bkd\.(\w+)", text)}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("kdtrain"):
                imported |= {(node.module, alias.name) for alias in node.names}
    assert imported - stated == set() and len(imported) > 20


def test_a_run_takes_all_that_a_package_has_for_it_and_the_command_of_the_package_reads_it(forks, strangers):
    (forks.root / "table.toml").write_text("kind = 'table'\ntokenizer = 'teacher'\n[options]\nsize = 300\n")
    text = ("distill", "--student", "student.toml", *forks.data, "--num-sequences", 40, *forks.fast, "--no-compile")
    taught = ("--teacher", "table.toml", "--temperature-mode", "halving", "--temperature", 2, "--temperature-end", 1)
    given = (*taught, "--write-behind", 20, "--optimizer", "muon", "--divergence", "squares", "--out", "run")
    logs = ("--log-to", "file:shown.json", "--precision", "fp32", "--alpha", 0.5, "--steps", 3)
    strangers(*text, *given, *logs, "--source", "backwards").ok()
    logged = json.loads((forks.root / "run/shown.json").read_text())
    assert strangers("losses", "run", "--json").json == logged["losses"] and [*logged["losses"]] == ["1", "2", "3"]
    assert "start" in {kind for _, kind in logged["events"]}
    assert all(0 < line["kd"] < 1 for line in forks.metrics("run"))
    assert [line["T"] for line in forks.metrics("run")] == [2.0, 1.5, 1.25]
    assert any(name.endswith(".momentum") for name in forks.tensors("run"))
    tokens = kd.Cache(forks.root / "run/data")["train"].read(np.arange(40)).tokens.flip(1)
    written = {int(path.stem): json.loads(path.read_text()) for path in (forks.root / "run/selfwritten").iterdir()}
    assert len(written) == 18 and all(row[:20] == tokens[at, :20].tolist() for at, row in written.items())
    again = strangers(*text, *given, *logs, "--source", "cache")
    assert again.code == 2 and "--source (was backwards, now cache)" in again.refusal()
    learned = strangers(*text, "--source", "backwards", "--out", "learned", "--temperature-mode", "likelihood")
    assert learned.code == 2 and "needs a teacher to learn T from, and" in learned.refusal()


def test_a_package_imports_caches_of_another_layout(forks, strangers, model):
    rows = []
    for row in kd.Cache(forks.root / "cache")["train"]:
        found = most_likely(model, row["tokens"][None, :-1])
        pairs = torch.stack([found.indices.double(), found.values.double()], -1).flatten(2)[0]
        rows.append({"input_ids": row["tokens"].tolist(), "pairs": pairs.tolist()})
    (forks.root / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made_by = ("--teacher", "teacher", "--tokenizer", "teacher", "--top-k", TOP)
    strangers("import", "pairs.jsonl", "--layout", "pairs", *made_by, "--out", "imported").ok()
    imported, teachers = kd.Cache(forks.root / "imported"), kd.Cache(forks.root / "cache")
    assert sum(len(imported[split]) for split in ("train", "validation")) == len(teachers["train"])
    assert_same_entries(imported, dict.fromkeys(("train", "validation"), teachers["train"]))


def test_a_package_captures_from_servers_of_another_engine(forks, strangers, model):
    lock = threading.Lock()

    class Server(BaseHTTPRequestHandler):
        """SGLang's interface, with the teacher behind it."""

        def do_GET(self):
            self.answer({"object": "list", "data": [{"id": "teacher", "max_model_len": 64}]})

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/generate":
                return self.send_error(404)
            ids = asked["input_ids"]
            with lock, torch.no_grad():
                logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            top = [[*zip(*map(torch.Tensor.tolist, each.topk(asked["top_logprobs_num"])), [None] * 99, strict=False)]
                   for each in logprobs[:-1]]  # fmt: skip
            own = [[None, ids[0], None], *([float(p[i]), i, None] for p, i in zip(logprobs, ids[1:], strict=False))]
            facts = {"prompt_tokens": len(ids), "input_token_logprobs": own, "input_top_logprobs": [None, *top]}
            self.answer({"text": "", "meta_info": facts})

        def answer(self, record):
            content = json.dumps(record).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    spec = "kind = 'served'\ntokenizer = 'teacher'\n\n[options]\nengine = 'sglang'\n"
    (forks.root / "served.toml").write_text(spec)
    at = ("--teacher", "served.toml", "--teacher-server", f"http://127.0.0.1:{server.server_port}", "--top-k", TOP)
    small = (*forks.data, "--num-sequences", 12, "--validation-sequences", 8)
    try:
        strangers("cache-teacher", *at, *small, "--out", "served").ok()
    finally:
        server.shutdown()
        server.server_close()
    served, teachers = kd.Cache(forks.root / "served"), kd.Cache(forks.root / "cache")
    assert_same_entries(served, teachers)
    assert len(served["train"]) == 12 and served.temperature_range == (1.0, 1.0)
