"""``sdpipe run``: the pipelines of one machine as supervised jobs. Imports no torch."""
