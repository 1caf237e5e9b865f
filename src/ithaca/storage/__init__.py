"""What outlives a run: checkpoints to go on from, and folders that transformers loads.

    checkpoint       save a training run: weights, optimizer, step, cursor, random states; loading: and back
    place            where checkpoints lie (a protocol, and folders on disk): list, open, create, publish, remove; no torch
    files · record   what a checkpoint holds, which are whole, which is the newest; what its JSON must say; no torch
    publish · keep   how one comes about whole or not at all; which ones stay; no torch
    check · listing  every byte and number of one; what `ithaca ckpt` shows; no torch, but for numbers
    digest · stream  SHA-256 by blocks; taken while a file is written
    dcp              torch's writer over a place, its errors in one line; safe_metadata: its reader, and the one pickle it writes,
                     read without running what it says
    state · low_bit  a run as a flat table of tensors; optimizer states in 8 bits; shards: DTensors by their rows
    finite           no number that is NaN or infinite goes in or out; fingerprint: is it the same frozen base
    rng · ranks      random states as JSON; an error on one rank is the same error on all
    export           weights out, for `from_pretrained`: adapters, hf_folder, safetensors_shards

docs/reference/checkpoints.md describes the files.
"""
