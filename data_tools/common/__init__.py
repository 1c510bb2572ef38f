"""What several of the programs share."""
