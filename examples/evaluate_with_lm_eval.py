"""Evaluate an exported student with EleutherAI's lm-eval on text of your own: bits a byte and perplexity a word.

    pip install "lm_eval[hf]"
    kdtrain export runs/a --out my-student
    python examples/evaluate_with_lm_eval.py my-student held-out.jsonl

Each line of the second file is {"text": ...}. The task is a local one, so nothing is downloaded; lm-eval's own tasks
take the same model: lm_eval --model hf --model_args pretrained=my-student --tasks hellaswag,arc_easy
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

TASK = """
task: held_out
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""


def main(model: str, rows: str) -> None:
    """Print the metrics of the task, one a line."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "held_out.yaml").write_text(TASK.format(rows=json.dumps(str(Path(rows).resolve()))))
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": model, "dtype": "float32"},
            tasks=["held_out"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            device="cpu",
            batch_size=1,
        )
    for name, value in found["results"]["held_out"].items():
        if isinstance(value, float):
            print(name.removesuffix(",none"), f"{value:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
