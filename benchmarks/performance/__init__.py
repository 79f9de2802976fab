"""What things cost in time and memory, a script a subject, on a CPU and on a GPU."""
