"""Tables whose ids are already encoded, CSV or Parquet, as input of the converter."""
