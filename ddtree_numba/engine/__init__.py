"""A real small model, decoded with the stages: one token at a time, with a draft chain, and with a draft tree.

>>> from ddtree_numba.engine import Decoder, decode_text, encode_text, load_model
>>> decoder = Decoder(load_model(), mode="tree", budget=32)
>>> rounds = list(decoder.decode(encode_text("def main("), max_new_tokens=40))
>>> len(rounds) < 40, len(decode_text(token for each in rounds for token in each.tokens))
(True, 40)
"""

from ddtree_numba.engine.byte_tokenizer import decode_text, encode_text
from ddtree_numba.engine.checkpoint import CheckpointError
from ddtree_numba.engine.decoding import Decoder, Round, greedy
from ddtree_numba.engine.model_pair import DEFAULT_MODEL, ModelPair, load_model

__all__ = [
    "DEFAULT_MODEL",
    "CheckpointError",
    "Decoder",
    "ModelPair",
    "Round",
    "decode_text",
    "encode_text",
    "greedy",
    "load_model",
]
