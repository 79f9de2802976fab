"""kdtrain: knowledge distillation of language models, from a teacher's cached logits to a smaller student."""

__version__ = "0.1.0"
