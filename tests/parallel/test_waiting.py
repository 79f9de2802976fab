"""Ranks wait for a rank as long as it works, and not for one that is silent."""

import os
import signal
import time
from pathlib import Path

WAIT = """
import os, signal, time
from datetime import timedelta
import torch
from kdtrain import ranks

with ranks.process_group(torch.device("cpu"), 60):
    ranks._timeout = timedelta(seconds=2)
    ranks._control = ranks.control_group()
    print(ranks.on_main(lambda: time.sleep(3) or "worked"))
    with ranks.raise_on_all_ranks():
        time.sleep(0 if ranks.is_main() else 3)
    started = time.monotonic()
    try:
        ranks.on_main(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    except RuntimeError as error:
        print(ranks.lost_rank(error), time.monotonic() - started < 50, sep="\\n", flush=True)
os._exit(0)
"""


def test_a_rank_may_work_for_longer_than_the_timeout_but_not_be_silent_for_it(server, tmp_path):
    out, begun = tmp_path / "said.1.out", time.monotonic()
    stopped, _ = server.begin(Path("-c"), [WAIT], tmp_path, tmp_path / "said", 2)
    try:
        while not out.exists() or out.read_text().count("\n") < 3:
            assert time.monotonic() - begun < 300, (tmp_path / "said.1.err").read_text()
            time.sleep(0.05)
    finally:
        os.kill(stopped, signal.SIGKILL)
        server.end()
    said = out.read_text().splitlines()
    assert said[0] == "worked" and said[2] == "True"
    assert "rank 1 lost another rank" in said[1] and "Timed out" in said[1]
