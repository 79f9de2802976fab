"""Starts a real vLLM, whose executable KDTRAIN_VLLM names, for the tests marked `vllm`; each start takes a minute."""

import os
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parents[1]
TEACHER = ROOT / "teachers/stdlib-5m"
NAME = "stdlib-5m"
"""Of whatever model is served."""


@dataclass
class Vllm:
    """A running server."""

    url: str
    log: Path
    process: subprocess.Popen

    def kill(self) -> None:
        """End it and all that it started, as a machine that fails does."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def vllm(folder: Path, model: Path, *options: str, plugin: bool = False, port: int | None = None) -> Iterator[Vllm]:
    """Start a server of `model` for the block; with the plugin it sees this clone as an installed kdtrain."""
    site = folder / "site" / "kdtrain-0.dist-info"
    site.mkdir(parents=True, exist_ok=True)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in found.items()) for group, found in points.items()]
    (site / "entry_points.txt").write_text("\n".join(lines))
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: kdtrain\nVersion: 0\n")
    port = port or free_port()
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = f"{site.parent}{os.pathsep}{ROOT}" if plugin else ""
    command = [os.environ["KDTRAIN_VLLM"], "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "600", "--max-logprobs", "64", "--enforce-eager"]
    log = folder / f"server-{port}.log"
    with log.open("w") as said:
        process = subprocess.Popen(
            [*command, "--served-model-name", NAME, *options],
            env=environment,
            stdout=said,
            stderr=said,
            cwd=folder,
            start_new_session=True,
        )
    server = Vllm(f"http://127.0.0.1:{port}", log, process)
    try:
        until = time.monotonic() + 400
        while not _healthy(server.url):
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-4000:]
            time.sleep(1)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def _healthy(url: str) -> bool:
    try:
        return requests.get(f"{url}/health", timeout=5).status_code == 200
    except requests.RequestException:
        return False


def free_port() -> int:
    """Find a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def worn(folder: Path) -> Path:
    """Save the shipped teacher in `folder`, with its weights rounded to 8 bits."""
    import torch

    from kdtrain.models.loading import load_teacher
    from kdtrain.models.spec import ModelSpec
    from kdtrain.models.tokenizer import load_tokenizer

    spec = ModelSpec.read(NAME, "teachers")
    model = load_teacher(spec, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.float().abs().amax(-1, keepdim=True) / 127
            parameter.copy_((parameter.float() / scale).round() * scale)
    model.save_pretrained(folder)
    load_tokenizer(spec).save_pretrained(folder)
    return folder
