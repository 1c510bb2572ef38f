"""Checksums of records and fingerprints of strings, many at once, with numpy alone."""
