"""What a person sees of a run, and what is written down about it.

record · rates       the numbers of a step; time, memory and what ranks tell each other about them
metrics · trackers   where they are written: metrics.jsonl, TensorBoard, Weights & Biases
display · panel      the terminal while a run goes on; text: the same in lines
logs                 messages to their places, an error on one screen
profiler             a step measured: what holds memory, what takes time
report               pages to open in a browser
"""
