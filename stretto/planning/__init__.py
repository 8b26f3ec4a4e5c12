"""`stretto plan`: how a recipe would run best on given GPUs, said before anything runs.

    times   how long a step takes, part by part, from a GPU's figures and the shares of them that are reached
    layout  what sharing the work over several GPUs does to time and memory
    search  all choices that leave the training as it is, those that fit into memory, the fastest of them, and why
    table   the ranked table, the reasons, the recipe that is written
    probe   short runs of the best few, which replace computed times by measured ones

../hardware.py has the GPUs. Only `table` and `probe` import more than the standard library, so that an answer comes at
once.
"""
