"""`python -m kdtrain`, which is also how torchrun starts the command."""

from kdtrain.cli import main

if __name__ == "__main__":
    main()
