"""The fused output head: chunks of rows, their statistics, a small loss, and gradients in the same pass."""
