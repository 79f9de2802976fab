"""Universal logit distillation (Boizard et al. 2024, arXiv 2402.12030), to compare with: a loop over the library.

    L = CE + 1.5 sum_i |p_(i) - q_(i)|

with teacher's and student's probabilities sorted, whichever tokens they belong to. The paper pairs positions by their
number; here they are those at common boundaries, which the method does not ask for and which can only help it. The
teacher's p are the shares of a cache's samples, so that its sorted vector is a noisy one with at most 50 entries above
0: of the student's the 50 largest are compared with them, and the rest with 0, which is the same sum. Optimizer, rate,
order of the data, number of tokens and number format are those of the command.
"""

from pathlib import Path
from typing import Any

WEIGHT = 1.5
"""Of the second term, as published."""


def train(out: Path, spec: Path, view: Path, cache: Path, steps: int, lr: float, batch: int, seed: int) -> Path:
    """Train a student on the rows of a view, and export it to `out`, which is returned; not resumed in the middle."""
    import torch

    import kdtrain as kd
    from kdtrain.config.sections import OptimizerConfig
    from kdtrain.data import order
    from kdtrain.library import Cache
    from kdtrain.models.export import export_model
    from kdtrain.models.loading import load_student
    from kdtrain.models.spec import read_spec
    from kdtrain.models.tokenizer import tokenizer_files
    from kdtrain.tokenizers.view import View
    from kdtrain.training.optimizers import make_optimizer
    from kdtrain.training.schedule import learning_rate

    source = View(view, Cache(cache))
    rows, taught = source["train"], source.cache["train"]
    config = OptimizerConfig(lr=lr, warmup_steps=min(100, steps // 2))
    model = load_student(read_spec(f"{spec}"), vocab_size=source.record.sizes[1], seed=seed, device="cpu")
    optimizer = make_optimizer(kd.Student(model, kd.DistillationLoss(alpha=0.0)), config, lr)
    for step in range(1, steps + 1):
        chosen = rows.rows(order.batch(seed, (step - 1) * batch, batch, len(rows)))
        loss = _loss(model, chosen, taught)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, config)
        optimizer.step()
    export_model(model, tokenizer_files(view / "tokenizer"), out)
    return out


def _loss(model: Any, rows: Any, taught: Any) -> Any:
    import numpy as np
    import torch

    length = taught.manifest.settings.seq_len
    tokens_BT = torch.from_numpy(rows["tokens"].astype(np.int64))
    mask_N = torch.from_numpy(rows["loss_mask"].ravel().copy())
    with torch.autocast("cpu", torch.bfloat16):
        logits_BTV = model(input_ids=tokens_BT[:, :-1]).logits
    logprobs_NV = logits_BTV.flatten(0, 1).float().log_softmax(-1)
    own_N = -logprobs_NV.gather(1, tokens_BT[:, 1:].reshape(-1, 1)).squeeze(1)
    loss = own_N[mask_N].mean()
    source_N = rows["source"].ravel()
    at = np.flatnonzero((source_N >= 0) & (rows["said"].ravel() == 0))
    if not len(at):
        return loss
    numbers = np.unique(source_N[at] // length)
    targets = taught.read(numbers.tolist()).targets
    place = torch.from_numpy(np.searchsorted(numbers, source_N[at] // length) * length + source_N[at] % length)
    p_NK = (targets.counts[place] / targets.num_samples).sort(1, descending=True).values
    kept = min(p_NK.shape[1], logprobs_NV.shape[1])
    q_NK = logprobs_NV[torch.from_numpy(at)].exp().topk(kept, 1).values
    apart_N = (p_NK[:, :kept] - q_NK).abs().sum(1) + (1 - q_NK.sum(1)).clamp(min=0)
    return loss + WEIGHT * apart_N.mean()
