"""On-policy distillation in a plain PyTorch loop: the student writes, its teacher scores, and it learns from that.

python examples/on_policy_loop.py TEACHER MODEL [ROUNDS]
"""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import kdtrain as kd

PROMPTS = [f"{word} {name}" for word in ("def", "class", "import", "# The") for name in ("", "_read", "open", "test")]


def main(teacher_folder: str, model_folder: str, rounds: int = 3) -> None:
    """Train for some rounds of a pass each."""
    tokenizer = AutoTokenizer.from_pretrained(teacher_folder)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    student = kd.Student(model, kd.DistillationLoss(alpha=1.0)).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for number in range(1, rounds + 1):
        data = kd.rollouts(student, teacher, PROMPTS, tokenizer=tokenizer, number=number, max_new_tokens=24)
        for batch in DataLoader(data, batch_size=8, shuffle=True, collate_fn=kd.collate):
            output = student(**batch)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"round {number} loss {output.loss.item():.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
