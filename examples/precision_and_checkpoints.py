"""A loop with quantised products that switch off when they cost too much, and checkpoints that it resumes from.

python examples/precision_and_checkpoints.py CACHE MODEL FOLDER [STEPS]
"""

import sys

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import kdtrain as kd


def main(cache_folder: str, model_folder: str, folder: str, steps: int = 20) -> list[float]:
    """Train to step `steps`, from the newest checkpoint in `folder`; the losses of this call, nats per token."""
    torch.manual_seed(0)
    data = kd.Cache(cache_folder)["train"]
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    student = kd.Student(model, kd.DistillationLoss()).train()
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    switch = kd.quantize_(student, "mxfp4")  # fp8 on a GPU that has it
    controller = kd.PrecisionController(kd.Policy(quantized="mxfp4", rules=("loss",), threshold=4.7, window=2))
    store, first = kd.CheckpointStore(folder, keep=kd.Keep(rolling=3)), 0
    parts = {"student": student, "optimizer": optimizer, "controller": controller}
    if store.names():
        saved = store.load("latest")
        first = saved["step"]
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    loader = DataLoader(data, batch_size=8, drop_last=True, collate_fn=kd.collate)
    batches = [batch for _ in range(steps) for batch in loader][first:steps]
    losses = []
    for step, batch in enumerate(batches, first + 1):
        switch.position = controller.position
        output = student(**batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
        print(f"step {step} loss {losses[-1]:.4f} {controller.mode}")
        controller.observe(step, losses[-1])
        if step % 5 == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            store.save(step, {**state, "step": step}, {"loss": losses[-1]})
    return losses


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: python examples/precision_and_checkpoints.py CACHE MODEL FOLDER [STEPS]")
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
