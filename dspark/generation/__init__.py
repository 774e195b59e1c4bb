"""`dspark generate`: one prompt, its answer as it is committed, and how every token came about.

options  what was asked for, checked before anything is loaded
asked    prompt, logit bias and stop strings as token ids
reader   emitted tokens -> pieces of text that may be shown
frames   what --graphs decodes with
screen   pieces -> a terminal, a pipe or a picture
account  what a generation amounts to: the JSON document, the round table, the last line
run      all of it, in order
"""

from __future__ import annotations
