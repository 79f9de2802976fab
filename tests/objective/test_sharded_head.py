from pathlib import Path


def test_a_head_sharded_or_split_over_ranks_gives_the_loss_gradients_and_metrics_of_the_whole_head(run_ranks):
    run_ranks(Path(__file__).parent / "sharded_head_script.py", 2)
