"""The edge to FusionBench: its pools, its task pools, its saving."""
