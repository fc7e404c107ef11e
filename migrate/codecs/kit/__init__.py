"""Number formats as data: what a codec is made of.

A codec describes its format as a `NumberLayout` (`layout`) and leaves shapes, boxes and errors
(`geometry`), decoding (`decoding`) and the reference that it is checked against (`reference`) to
the kit. What it encodes is a `TensorEncoding` (`encoding`) by a `ScaleRule` (`scale_rules`), with a
reference of its own (`encoding_reference`). Importing the package imports neither numpy nor torch.
"""
