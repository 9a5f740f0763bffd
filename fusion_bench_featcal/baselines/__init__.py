"""Other mergers and post-merging methods, to compare with."""
