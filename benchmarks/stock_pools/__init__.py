"""FusionBench's stock model pools, run on tiny stand-ins for what they would download."""
