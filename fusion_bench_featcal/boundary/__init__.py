"""Where FusionBench meets FeatCal: its pools, its task pools, its saving."""
