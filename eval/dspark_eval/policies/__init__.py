"""`python -m dspark_eval.policies`: what each draft-length policy is worth, by prompt set.

sets      the three prompt sets;  arms: the policies compared
measure   whole-block rounds for replays, then real runs of every policy
document  the figures as JSON;  page: as markdown;  plots: the threshold sweep as a picture
"""
