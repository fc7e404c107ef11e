"""What can be said against rule files that load. A family of findings is a function that takes a
`FileSet` and yields a Diagnostic for each; its codes are pages M604 to M699.
"""
