"""Conversion of LibSVM and LibFFM lines to records."""
