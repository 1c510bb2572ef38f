"""What inspect_dataset writes."""
