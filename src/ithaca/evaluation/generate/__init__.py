"""Asking a model: prompts longer than one device holds, answers token by token.

prompt   a file and a question as token ids
cache    keys and values of a prompt, each rank those of its own tokens
greedy   the likeliest next token, again and again
"""
