"""Models as local folders, wherever they come from."""
