"""One rank of a rehearsal: `rehearsal_script.py OUT`. Rank 1 takes its time over the folder that rank 0 removes."""

import sys
import time
from pathlib import Path

import torch

from kdtrain.ranks import is_main, process_group, rank
from kdtrain.run.folder import trial_folder

with process_group(torch.device("cpu"), timeout=300.0):
    with trial_folder(Path(sys.argv[1])) as folder:
        time.sleep(0.5 * rank())
        assert folder.is_dir(), "rank 0 did not wait"
    assert not (is_main() and folder.exists())
