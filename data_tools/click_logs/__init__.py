"""Raw click logs: columns, vocabularies, and the ids that rows become."""
