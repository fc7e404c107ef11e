"""The state that Transformer Engine hides in `_extra_state`: decoded, classified, written again,
and never executed.

    record     what every form is normalised to, and which recipes there are, as data
    decode     bytes, archives and plain objects to a record
    verdict    what a record is, judged by what it holds
    states     those of a checkpoint that are objects, and which release wrote them all
    write      a record as the bytes that Transformer Engine 2.x writes, an object as bytes

Which key holds such a state is the rules' business, what becomes of it that of
`ops/extra_state.py`.
"""
