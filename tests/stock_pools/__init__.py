"""FusionBench's stock model pools, run on tiny stand-ins for what they would download."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "kit"))
