import sys
from pathlib import Path

# With importmode=importlib a test cannot import its neighbour by itself.
sys.path.insert(0, str(Path(__file__).parent))
