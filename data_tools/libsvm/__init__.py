"""Lines of LibSVM and LibFFM, and the records that they become."""
