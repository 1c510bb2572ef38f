"""Raw click logs: their columns, vocabularies, and the encoding of rows as ids."""
