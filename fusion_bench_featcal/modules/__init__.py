"""Modules of a block, groups of modules that share an input, and their recorded inputs."""
