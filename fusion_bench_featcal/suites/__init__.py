"""The bundled suites: data, weights, and the seeded builder that made them.

Import the module that is needed (`suites.image`, `suites.paths`, ...); importing this package costs
nothing.
"""
