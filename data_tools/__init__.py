"""Programs that prepare data, one per file."""
