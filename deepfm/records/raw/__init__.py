"""Raw rows: the kinds of their columns, what a cell says, and the map that gives it an id."""
