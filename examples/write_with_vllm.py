"""Write the rounds of `kdtrain distill --on-policy` with vLLM's offline inference, in place of kdtrain's own decoder.

    kdtrain distill --on-policy ... --write-with 'python examples/write_with_vllm.py {model} {prompts} {out}'

It was tried with a stand-in of the module `vllm` only. A fourth word is the share of the device's memory that vLLM
takes; the student's training, and its teacher, have theirs meanwhile.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main(model: str, prompts: str, out: str, memory: str = "0.4") -> None:
    """Continue each prompt as its line states, and write a line with the token ids of each answer."""
    lines = [json.loads(line) for line in Path(prompts).read_text().splitlines()]
    how = [
        SamplingParams(
            temperature=line["temperature"],
            top_p=line["top_p"],
            seed=line["seed"],
            max_tokens=line["max_tokens"],
            stop_token_ids=line["end_tokens"],
            detokenize=False,
        )
        for line in lines
    ]
    engine = LLM(model=model, gpu_memory_utilization=float(memory))
    found = engine.generate([{"prompt_token_ids": line["tokens"]} for line in lines], how)
    with Path(out).open("w") as file:
        for line, answer in zip(lines, found, strict=True):
            ids = list(answer.outputs[0].token_ids)
            file.write(json.dumps({"prompt": line["tokens"], "answer": ids}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
