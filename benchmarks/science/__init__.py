"""Studies of what distillation, temperature, tail rules and precision do; none of them is about speed."""
