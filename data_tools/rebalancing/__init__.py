"""Records in a new order, in even files, with other shares of the labels."""
