"""Starting the processes of a job, and ending them."""
