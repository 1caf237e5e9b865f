"""What outlives a run: checkpoints to go on from, and folders that transformers loads.

    checkpoint     save and load a training run: weights, optimizer, step, cursor, random states
    files          how a checkpoint folder is published, found, verified and pruned; no torch
    safe_metadata  reads the one pickle torch writes, without running what it says
    export         weights out: safetensors, config and tokenizer, for `from_pretrained`

docs/checkpoints.md describes the files.
"""
