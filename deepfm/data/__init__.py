"""Records: their formats, the data sets that hold them, and how a process reads its share."""
