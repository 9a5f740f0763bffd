"""Reading weights: the plan beforehand, the ledger of what was read, and what stands in for it."""
