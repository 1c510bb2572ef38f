"""Tables, CSV or Parquet: the cells of their rows, and encoded ids as input of the converter."""
