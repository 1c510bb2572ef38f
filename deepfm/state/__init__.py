"""What model_dir holds, and how a run resumes from it."""
