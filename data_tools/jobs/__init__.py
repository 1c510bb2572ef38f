"""The jobs that process data, each written once for every engine."""
