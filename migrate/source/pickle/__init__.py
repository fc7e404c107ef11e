"""Pickle streams, read without executing them and written without a pickler.

nodes      what a stream is read as, and its limits      machine    opcodes -> inert nodes
policy     which (global, arity) is known, and what it becomes
torch_objects, python_objects, quantized_tensors, te_grouped    how each of them is read
decoding   what they share                               tree       what they become
emit       inert nodes -> opcodes                        jsonform   inert nodes <-> JSON
dcp_metadata, dcp_stream, dcp_values, dcp_ranks          `.metadata` of torch.distributed.checkpoint
dcp_emit, dcp_rename                                     the same written, and with other names
"""
