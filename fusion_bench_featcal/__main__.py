"""`python -m fusion_bench_featcal` is the command `featcal`."""

import sys

from fusion_bench_featcal.cli import main

sys.exit(main())
