"""The processes of a job: who they are, whether they are alive, whether they agree."""
