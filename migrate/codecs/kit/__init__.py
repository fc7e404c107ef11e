"""Number formats as data: what a codec is made of.

A codec describes its format as a `NumberLayout` (`layout`) and leaves shapes, boxes and errors
(`geometry`), decoding (`decoding`) and the reference that it is checked against (`reference`) to
the kit. Importing the package imports neither numpy nor torch.
"""
