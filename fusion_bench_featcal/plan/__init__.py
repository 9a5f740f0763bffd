"""What a calibration will take, told before anything is loaded: time, memory, bytes, files.

Operations and bytes are counted on a model without weights; the machine's rates are measured in a
second; a few constants, fitted once, stand for what neither tells.
"""
