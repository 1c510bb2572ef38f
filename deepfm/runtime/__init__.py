"""How a program starts, stops, writes files and uses its machine."""
