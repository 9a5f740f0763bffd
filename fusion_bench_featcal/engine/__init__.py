"""Parts of the calibration loop: samples, hooks, sums and solves of one block."""
