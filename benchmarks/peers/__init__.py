"""The same table made with other tools, each a program of its own.

`python -m benchmarks.peers.NAME FOLDER [SEED …]` prints an object: by seed the nine counts of
`common.COUNTS`. None of them looks for impossible values.
"""
