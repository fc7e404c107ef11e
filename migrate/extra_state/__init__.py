"""The state that Transformer Engine hides in `_extra_state`: decoded, classified, written again,
and never executed.

    recipes    which recipes there are, as data
    record     what every form is normalised to
    objects    states that are objects beside the tensors, as bytes
    decode     bytes, archives and plain objects to a record
    verdict    what a record is, judged by what it holds
    normal     a record of any release as the releases from 2.0 on hold it
    write      a record as the bytes that Transformer Engine 2.x writes

Which key holds such a state is the rules' business, what becomes of it that of
`ops/extra_state.py`.
"""
