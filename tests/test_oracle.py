"""The oracle is worth something only while it shares nothing with what it judges."""

import subprocess
import sys
from pathlib import Path

KIT = Path(__file__).with_name("kit")

# runs the oracle on a small network in an interpreter where the package cannot be imported
RUN = """
import sys
sys.modules["fusion_bench_featcal"] = None
sys.path.insert(0, FOLDER)
import torch
from oracle import Knobs, calibrate_slowly
torch.manual_seed(0)
base, expert, merged = (
    torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
    for _ in range(3)
)
blocks = ["0", "1", "2"]
modules = {name: [name] for name in blocks}
batches = dict(task=[torch.randn(9, 3)])
result = calibrate_slowly(merged, base, dict(task=expert), batches, blocks, modules, Knobs())
moved = [not torch.equal(a, b.double()) for a, b in
         zip(result.model.parameters(), merged.parameters())]
assert all(moved), moved
assert not any(name.startswith("fusion_bench") for name, m in sys.modules.items() if m)
print("independent")
"""


def test_oracle_runs_where_the_package_cannot_be_imported():
    script = RUN.replace("FOLDER", repr(str(KIT)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["independent"]
