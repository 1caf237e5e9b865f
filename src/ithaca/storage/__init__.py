"""What outlives a run: checkpoints to go on from, and folders that transformers loads.

    checkpoint     save and load a training run: weights, optimizer, step, cursor, random states
    files          what a checkpoint folder holds, which are whole, which is the newest; no torch
    publish · keep how one comes about whole or not at all; which ones stay; no torch
    digest         SHA-256 by blocks; stream · writer: taken while torch writes
    finite         no number that is NaN or infinite goes in or out
    safe_metadata  reads the one pickle torch writes, without running what it says
    export         weights out: safetensors, config and tokenizer, for `from_pretrained`

docs/checkpoints.md describes the files.
"""
