"""What the calibration loop is made of: samples, hooks, sums and solves of one block."""
