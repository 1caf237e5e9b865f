"""Does the model use its context? Loss by position, needles by length and depth, and the tasks around them.

languages   tokens of questions and answers: words, ids or the tokens of our synthetic sources
tasks       texts with known answers, as sources of rows
score       rows through a run, summed up over ranks by row and by position
held_out    text that is not trained on
suite       what a config asks for, evaluated: one record of numbers, the same on any layout
words       the record as tables for a terminal;  heatmap: as a picture
opening     from a run folder, a checkpoint or a Hugging Face folder to a prepared model
"""
