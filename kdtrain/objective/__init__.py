"""What a student is trained on: targets, temperature, divergences, the fused output head, metrics."""
