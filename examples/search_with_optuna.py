"""A search over several options at once with optuna; each trial is a run of `kdtrain distill`, and the study resumes.

pip install optuna
python examples/search_with_optuna.py CACHE STUDENT OUT [TRIALS [STEPS]]

For the learning rate alone, `kdtrain find-lr` takes fewer steps. Give it first, and search around what it says.
"""

import sys
from pathlib import Path

import optuna

import kdtrain as kd


def main(cache: str, student: str, out: str, trials: int = 12, steps: int = 300) -> optuna.Study:
    """Find learning rate, weight of the teacher and warm-up with the lowest validation loss."""

    def loss_of(trial: optuna.Trial) -> float:
        try:
            result = kd.distill(
                cache=cache,
                student=student,
                out=Path(out) / f"trial-{trial.number:03d}",
                steps=steps,
                lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True),
                alpha=trial.suggest_float("alpha", 0.0, 1.0),
                warmup_steps=trial.suggest_int("warmup_steps", 1, steps // 2, log=True),
                compile=False,
                log_to="none",
            )
        except kd.RunError as error:  # it diverged, or never got better than its start
            raise optuna.TrialPruned(str(error)) from error
        if result["stopped_by"] is not None:
            raise KeyboardInterrupt
        return result["best_validation_loss"]

    Path(out).mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="kdtrain",
        storage=f"sqlite:///{out}/study.db",
        load_if_exists=True,
    )
    # a study that resumes would else draw its first trials again
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    study.optimize(loss_of, n_trials=trials - len(study.trials))
    print(f"best {study.best_value:.4f} in trial-{study.best_trial.number:03d}: {study.best_params}")
    return study


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
