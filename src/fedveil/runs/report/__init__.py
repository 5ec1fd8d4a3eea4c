"""`report.html`: what a run, or several side by side, claim, learnt and left, on one page."""
