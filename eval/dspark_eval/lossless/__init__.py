"""Losslessness as a measurement: does what comes out have the target's law, and would we notice?

    python -m dspark_eval.lossless [--full]

statistics  the test, its false-alarm rate and its power
world       small distributions that are known in closed form, behind the interfaces of the runtime
play        rounds of the real proposal and verdict on them, thousands at once
planners    the policies, on batches of one or three
defects     mistakes that are planted and have to be found
model       the same on a real, tiny model, through its cache
suite       the grid of cases and the report
"""

from __future__ import annotations
