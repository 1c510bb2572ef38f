"""Files wherever they are: on this machine or on S3."""
