"""Pipeline-parallel training on unequal, shared GPUs: SDPipe as a Lightning strategy."""
