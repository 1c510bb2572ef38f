"""Files wherever they are: on this machine, on S3 or in Hadoop's file system."""
