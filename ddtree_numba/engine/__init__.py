"""A real small model, decoded with the stages: one token at a time, with a draft chain, and with a draft tree.

`load_model` reads a target and its drafter, `decode` yields one `Round` per pass of the target.
"""
