"""`python -m benchmarks.performance SECTION`: what is claimed about a GPU, measured on one (`harness/sections.py`)."""

import sys

from benchmarks.harness.sections import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
