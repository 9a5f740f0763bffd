"""Estimate of a calibration's time, memory and reads, made before any weight is loaded.

Memory and bytes follow from the shapes of the model's structure, run once on the meta device; time
is the FLOPs over one short probe of the machine, and rough.
"""
