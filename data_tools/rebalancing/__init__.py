"""Shuffles records, spreads them evenly over files, and changes the share of each label."""
