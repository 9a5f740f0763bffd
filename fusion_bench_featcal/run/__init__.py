"""One calibration: its models and samples, processes, finished blocks and log."""
