"""Routing of a decode step: the router's product (`logits`), and from its sums to rows in expert order, which takes XLA
a dozen launches; then tokens in that order (`gather`). Its reference is the model's own: `route` and `dispatch_of` of
`models.moe`.
"""
