"""Elements of tensors as raw numbers: shared by codecs, ops, formats and what runs them."""
