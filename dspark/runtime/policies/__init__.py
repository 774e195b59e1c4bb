"""How long a draft is: policies, and what they may know.

frontier    the next undecided position of every row, and the protocol of a policy
fixed, entropy, confidence, throughput, auto    the policies;  walk: what three of them share
bands       siblings and cuts by confidence, on top of any of them
"""

from dspark.runtime.policies.auto import Auto, AutoSettings
from dspark.runtime.policies.bands import Bands, band_names
from dspark.runtime.policies.confidence import Confidence
from dspark.runtime.policies.entropy import Entropy
from dspark.runtime.policies.fixed import Fixed
from dspark.runtime.policies.frontier import Frontier, Policy, plan_block
from dspark.runtime.policies.throughput import Delayed, Throughput

__all__ = [
    "Auto",
    "AutoSettings",
    "Bands",
    "Confidence",
    "Delayed",
    "Entropy",
    "Fixed",
    "Frontier",
    "Policy",
    "Throughput",
    "band_names",
    "plan_block",
]
