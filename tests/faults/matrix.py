"""The fault matrix: its rows, and what has to be counted at least when all of it runs (`make faults`).

A test says by `@pytest.mark.fault("K1")` which row it covers. Each row also has a negative control,
`@pytest.mark.control("K1")`: a test which switches the mechanism off, or plants the fault in the comparison, and passes
only if the comparison then fails. A test that tries many cases counts them by the fixture `tally`, and asks the fixture
`whole` how many to try: few in `make test`.
"""

from __future__ import annotations

ROWS = {
    "K1": "killed at any line of a save",
    "K2": "one of two processes killed while they save",
    "K3": "power cut: writes that were not flushed are gone",
    "K4": "killed at random times and resumed, again and again",
    "D1": "the disk is full at any byte of a save",
    "D2": "the disk will be too small",
    "C1": "checkpoint files changed in any way",
    "C2": "random sequences of good, torn, rotten and refused saves",
    "C3": "resumed with another model, seed, data or optimizer",
    "C4": "a save in the background fails, or is cut off",
    "C5": "errors of the system that pass, and checkpoints under another name",
    "R1": "interrupted and resumed: the same bits",
    "R2": "the same in two processes, with each kind of parallelism and each technique",
    "R3": "saving, logging and evaluating change nothing",
    "R4": "exact techniques off, on, off",
    "E1": "resumed on another number of processes",
    "E2": "numbers of processes that do not fit",
    "N1": "a loss or gradient that is not finite, in one process",
    "N2": "one such update, then healthy ones",
    "N3": "spikes of the gradient",
    "N4": "weights that are not finite are not saved",
    "N5": "odd inputs of 8-bit layers",
    "N6": "evaluations that are not finite; replicas that differ",
    "S1": "SIGTERM to one process, in any phase of a run",
    "S2": "signals twice, early, and of other kinds",
    "S3": "the signals of a control group: to the launcher and to every process",
    "H1": "a process is killed while others wait for it",
    "H2": "a process is frozen, or its loader hangs",
    "H3": "an exception in one process; processes that call different collectives",
    "O1": "out of memory",
    "X1": "pickles and programs in the place of data",
    "X2": "hostile manifests and headers",
    "X3": "fuzzed configurations",
    "X4": "calls that run what they load",
    "X5": "modes of files, links, secrets",
    "X6": "files under a wrong suffix, under an audit hook",
    "T1": "token files that are damaged, forged, or change while they are read",
    "T2": "every sample once an epoch, in an order that depends on the seed and the step alone",
    "G1": "the same run twice",
    "G2": "layers are dropped alike in all processes",
    "L1": "two runs in one folder, stale locks, clocks that go back",
    "L2": "killed while the log is written",
    "L3": "the same failure again and again",
    "L4": "telemetry that fails",
}
# Tests of these rows, which are the longest, are begun first: two workers then end at about the same time.
FIRST = (("fault", "K1"), ("fault", "K4"))
MINIMA = {
    "crash points": 8_000,
    "kills": 500,
    "kills of two processes": 20,
    "mutations": 1_900,
    "retention sequences": 3_000,
    "fuzzed configurations": 5_000,
    "hostile inputs": 160,
}
