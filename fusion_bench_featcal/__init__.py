"""FeatCal: feature calibration of merged models."""
