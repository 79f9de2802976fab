"""Ranks wait for a rank as long as it works, and not for one that is silent."""

import os
import socket
import subprocess
import sys

WAIT = """
import os, signal, time
from datetime import timedelta
import torch
from kdtrain import ranks

with ranks.process_group(torch.device("cpu"), 60):
    ranks._timeout = timedelta(seconds=2)
    ranks._control = ranks.control_group()
    print(ranks.on_main(lambda: time.sleep(5) or "worked"))
    with ranks.raise_on_all_ranks():
        time.sleep(0 if ranks.is_main() else 5)
    started = time.monotonic()
    try:
        ranks.on_main(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    except RuntimeError as error:
        print(ranks.lost_rank(error), time.monotonic() - started < 50, sep="\\n")
os._exit(0)
"""


def test_a_rank_may_work_for_longer_than_the_timeout_but_not_be_silent_for_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free.getsockname()[1]}", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WAIT],
            env={**os.environ, **where, "RANK": f"{rank}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = ranks[1].communicate(timeout=300)[0].splitlines()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert said[0] == "worked" and said[2] == "True"
    assert "rank 1 lost another rank" in said[1] and "Timed out" in said[1]
