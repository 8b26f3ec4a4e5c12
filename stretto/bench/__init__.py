"""`stretto bench`: the same training step through Stretto and through what one would otherwise use, side by side on one
machine, in one run.

    workloads   what is trained: named models and the shapes of their batches
    batches     the same random tokens for everyone, in the form that each reads best
    peers       Hugging Face models: eager, compiled, compiled with CUDA graphs; and by stretto.accelerate
    measure     time, memory, where the time went, and the floor it is compared with
    worker      one contestant on one workload, in a process of its own
    contest     all of them one after another, whatever happens to any; tables, JSON and the chart
"""
