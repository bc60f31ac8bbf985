"""Results as text, columns and objects: a module a kind, and `pairs` for all that compare two."""
