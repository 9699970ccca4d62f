"""Routing of a decode step: from the router's sums to rows in expert order, which takes XLA a dozen launches.
Its reference is the model's own: `route` and `dispatch_of` of `models.moe`.
"""
