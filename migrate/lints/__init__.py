"""What can be said against rule files that load: each family of findings is one module with a
`find_problems`.
"""
