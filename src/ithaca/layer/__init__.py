"""One decoder layer, exact, as one autograd Function: `composed` holds whole tensors, `streamed` only pieces of them."""

from .call import LayerCall, run_layer

__all__ = ["LayerCall", "run_layer"]
