"""Pickle streams, read without executing them and written without a pickler.

machine    opcodes -> inert nodes          emit    inert nodes -> opcodes
limits, keys, measure, opcodes             what the machine holds streams to
policy     which (global, arity) is known, and what it becomes
torch_objects, containers, numpy_objects, dtensor   how each of them is read; decoding: what they
share tree       what they become                  dcp_metadata, dcp_checks   `.metadata` of
torch.distributed.checkpoint
"""
