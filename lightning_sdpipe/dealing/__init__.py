"""Which pipeline trains which batches: leases of the shards of a data set, dealt by speed.

Pure, as the policies are.
"""
