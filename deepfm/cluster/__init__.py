"""The processes of a job: who they are, whether they live, whether they agree."""
