"""One decoder layer, exact, as one autograd Function: `composed` holds whole tensors, `streamed` only pieces of them."""
