"""Who does a job's work: the processes of one machine, or Spark.

An engine has the methods of `processes.Processes`; data_tools/jobs/ is written on them.
"""
