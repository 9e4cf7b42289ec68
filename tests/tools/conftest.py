"""Tools and reward files are scripts, not a package: their folders go onto the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "bench"), str(ROOT / "scripts" / "rewards")]
