"""Models named by a folder or hub id, as local folders."""
