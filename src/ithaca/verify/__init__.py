"""`ithaca verify`: prove on the user's own machine that a stack computes what the untouched model computes."""
