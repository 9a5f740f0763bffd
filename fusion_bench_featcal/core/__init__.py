"""Mathematics of calibration: tensors in, tensors out."""
