"""The FSDP2 group that trains the policy: packed batches in, new versions of the weights out."""
