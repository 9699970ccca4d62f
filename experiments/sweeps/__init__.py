"""The machinery of `experiments.sweep`: spec (axes to points), named, ledger, point (the process around one point's),
workers (where points run), record (sweep.json), control (the loop), table.
"""
