"""What model_dir holds, and how a run goes on from it."""
