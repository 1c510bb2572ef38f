"""Code that several of the programs share."""
