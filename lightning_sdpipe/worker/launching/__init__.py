"""Start and end of the processes of a job."""
