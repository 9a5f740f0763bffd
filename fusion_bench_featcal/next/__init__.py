"""Algorithm 1 in a smaller loop, which is to take the place of `engine` (docs/architecture.md)."""
