"""Running a target, plainly or with a drafter beside it.

records    what crosses boundaries: Proposal, Verdict, RoundRecord, Generation
sampling   logits -> probabilities -> token, the one way for target and drafter
target     the protocol every target implements
proposal   one draft pass;  verify: one losslessness decision;  decode: the loop of both
plain      one token per step, the baseline and the source of distillation responses
"""

from __future__ import annotations
