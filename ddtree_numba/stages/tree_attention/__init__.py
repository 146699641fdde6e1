from ddtree_numba.stages.tree_attention.reference import tree_attention_reference

__all__ = ["tree_attention_reference"]
